// The conversation as messages, tool calls with their arguments, and replies with their rewards and incidents.

import { facts, incidents, rewards } from "./block_head.js";
import { h } from "./dom.js";
import { clipped, contentText, number, plural, seconds } from "./format.js";

const MOST_LETTERS = 6000;

/**
 * @param onTokens  Called with the index of a token to show in the token view.
 * @param forkOf  Returns the address of the what-if page of a turn.
 */
export function conversation(trajectory, { onTokens, forkOf }) {
  const turnOf = new Map(
    trajectory.turns.filter((block) => block.message).map((block) => [block.message, block]),
  );
  const items = [];
  const before = trajectory.blocks[0];
  if (before?.origin === "prompt" && (before.incidents.length || before.feedback.length)) {
    items.push(h(".outcome", {}, rewards(before), incidents(before)));
  }
  let asking = null;
  let place = 0;
  for (const message of trajectory.messages) {
    const block = turnOf.get(message);
    if (message.role === "assistant") [asking, place] = [block ?? null, 0];
    const call = message.role === "tool" && asking ? callOf(asking, place++) : null;
    items.push(messageOf(message, { block, call, trajectory, onTokens, forkOf }));
  }
  const withoutMessage = trajectory.turns.filter((block) => !block.message);
  items.push(...withoutMessage.map((block) => turnWithoutMessage(block, trajectory, { onTokens, forkOf })));
  if (!items.length) items.push(h("p.empty", {}, "No messages are stored. See the token view."));
  return h(".conversation", {}, items, ending(trajectory));
}

function messageOf(message, { block, call, trajectory, onTokens, forkOf }) {
  const calls = Array.isArray(message.tool_calls) ? message.tool_calls : [];
  const reasoning = message.reasoning_content ?? message.reasoning;
  return h(
    "article.message",
    { "data-role": message.role },
    h(
      "header",
      {},
      h("span.role", {}, roleOf(message, block)),
      call && callFacts(call),
      block && turnFacts(block, trajectory, { onTokens, forkOf }),
    ),
    reasoning && h("details.reasoning", {}, h("summary", {}, "reasoning"), prose(contentText(reasoning))),
    prose(contentText(message.content)),
    calls.map(toolCall),
    block && tokenText(trajectory.textWithoutMessage(block), MOST_LETTERS),
  );
}

/** Returns the text of the tokens of a turn with a note; null without a text. */
export function tokenText(text, most) {
  if (!text) return null;
  return h(
    ".token-text",
    {},
    h(".muted", {}, "The message has no content and no tool call. The model's tokens, as text:"),
    clippable(text, "pre", most),
  );
}

function turnFacts(block, trajectory, { onTokens, forkOf }) {
  const show = { onclick: () => onTokens(block.start), "aria-label": `Tokens of turn ${block.turn}` };
  const fork = { href: forkOf(block.turn), "aria-label": `What if turn ${block.turn} were different?` };
  return [facts(block, trajectory), h("button.link", show, "tokens"), h("a.link", fork, "what if…")];
}

function roleOf(message, block) {
  if (block) return `assistant · turn ${block.turn}`;
  return message.role === "tool" && message.name ? `tool · ${message.name}` : String(message.role ?? "?");
}

/** Returns the span and the feedback of a turn's tool call. */
function callOf(block, number) {
  const span = block.calls.find(({ details }) => details.number === number) ?? null;
  return { span, feedback: block.feedback[number] ?? null };
}

function callFacts({ span, feedback }) {
  const extra = feedback?.extra && Object.keys(feedback.extra).length ? JSON.stringify(feedback.extra) : null;
  return [
    span && h("span.pill", {}, `${span.name} ${seconds(span.end - span.start)}`),
    feedback && rewards({ feedback: [feedback] }),
    feedback?.incident && h("span.pill.bad", {}, String(feedback.incident).replaceAll("_", " ")),
    extra && h("span.muted", { title: extra }, clipped(extra, 80)),
  ];
}

function toolCall(call) {
  const called = call?.function ?? call ?? {};
  return h(".call", {}, h("span.call-name", {}, String(called.name ?? "?")), argumentsOf(called.arguments));
}

function argumentsOf(given) {
  let values = given;
  if (typeof given === "string") {
    try {
      values = JSON.parse(given);
    } catch {
      return h("pre.bad", { title: "These arguments are not valid JSON" }, given);
    }
  }
  if (!values || typeof values !== "object") return h("code", {}, JSON.stringify(values) ?? "");
  return h(
    "dl.arguments",
    {},
    Object.entries(values).map(([name, value]) => [
      h("dt", {}, name),
      h("dd", {}, typeof value === "string" ? clippable(value, "pre") : h("code", {}, JSON.stringify(value))),
    ]),
  );
}

const prose = (text) => (text ? clippable(text, ".prose") : null);

/** Returns an element with a text. A long text is cut and gets a button that shows the rest. */
export function clippable(text, tag, most = MOST_LETTERS) {
  if (text.length <= most) return h(tag, {}, text);
  const element = h(tag, {}, text.slice(0, most));
  const showAll = () => {
    element.textContent = text;
    more.remove();
  };
  const more = h("button.link", { onclick: showAll }, `… ${number(text.length - most)} more characters`);
  return [element, more];
}

function turnWithoutMessage(block, trajectory, handlers) {
  return h(
    "article.message",
    { "data-role": "assistant" },
    h(
      "header",
      {},
      h("span.role", {}, `assistant · turn ${block.turn}`),
      turnFacts(block, trajectory, handlers),
    ),
    prose(trajectory.text(block.start, block.end)),
  );
}

function ending({ meta }) {
  return h(
    "footer.ending",
    {},
    h("b", {}, String(meta.stop_reason ?? "ended").replaceAll("_", " ")),
    meta.reward === null || meta.reward === undefined ? " · no reward" : ` · reward ${number(meta.reward)}`,
    meta.num_incidents ? ` · ${plural(meta.num_incidents, "incident")}` : "",
  );
}
