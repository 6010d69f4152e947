// The turns of several trajectories side by side.

import { clippable, tokenText } from "./conversation.js";
import { h } from "./dom.js";
import { contentText, plural, seconds } from "./format.js";

const LETTERS = 600;

/** Returns each turn with its replies. */
export function turnsOf(trajectory) {
  const { messages, turns } = trajectory;
  const own = new Map(turns.filter((block) => block.message).map((block) => [block.message, block]));
  if (!own.size)
    return turns.map((block) => ({
      block,
      text: trajectory.text(block.start, block.end),
      calls: [],
      replies: [],
    }));
  const found = [];
  for (const message of messages) {
    const block = own.get(message);
    if (block)
      found.push({
        block,
        text: contentText(message.content),
        tokenText: trajectory.textWithoutMessage(block),
        calls: callsOf(message),
        replies: [],
      });
    else if (found.length) found.at(-1).replies.push(contentText(message.content));
  }
  return found;
}

function callsOf({ tool_calls: calls }) {
  return (Array.isArray(calls) ? calls : []).map((call) => {
    const { name, arguments: given } = call?.function ?? call ?? {};
    return `${name}(${argumentsText(given)})`;
  });
}

/** Formats arguments as `order: 31, note: "urgent"`. Invalid JSON is returned unchanged. */
function argumentsText(given) {
  let values = given;
  try {
    values = typeof given === "string" ? JSON.parse(given) : given;
  } catch {
    return given;
  }
  if (!values || typeof values !== "object" || Array.isArray(values)) return JSON.stringify(values) ?? "";
  return Object.entries(values)
    .map(([name, value]) => `${name}: ${JSON.stringify(value)}`)
    .join(", ");
}

const wordsOf = (turn) => (turn ? JSON.stringify([turn.text, turn.tokenText, turn.calls]) : "");

/** Returns the index of the first turn that differs; null if all are equal. */
export function firstDifference(columns) {
  const depth = Math.max(0, ...columns.map(({ turns }) => turns.length));
  for (let turn = 0; turn < depth; turn++) {
    if (new Set(columns.map(({ turns }) => wordsOf(turns[turn]))).size > 1) return turn;
  }
  return null;
}

/** Returns the cells of all turns, row by row. Turns that equal those of the column `leader` are marked. */
export function turnRows(columns, { leader, parting }) {
  const depth = Math.max(0, ...columns.map(({ turns }) => turns.length));
  return Array.from({ length: depth }, (_, turn) =>
    columns.map((column) => cellOf(column, { turn, leader, isParting: turn === parting })),
  );
}

function cellOf({ turns }, { turn, leader, isParting }) {
  const own = turns[turn];
  if (!own) return h(".turn-cell.gone", {});
  const isSame = leader && leader.turns !== turns && wordsOf(own) === wordsOf(leader.turns[turn]);
  const { block } = own;
  return h(
    `.turn-cell${isSame ? ".same" : ""}${isParting ? ".parting" : ""}`,
    {},
    h(
      ".turn-name",
      {},
      `turn ${block.turn}`,
      h(
        "span.muted",
        {},
        ` ${plural(block.length, "token")}${block.seconds ? ` · ${seconds(block.seconds)}` : ""}`,
      ),
      isSame && h("span.muted", {}, " · same"),
    ),
    own.text && clippable(own.text, ".prose", LETTERS),
    tokenText(own.tokenText, LETTERS),
    own.calls.map((call) => h(".call-line", {}, clippable(call, "code", LETTERS))),
    block.incidents.map(({ kind, detail }) =>
      h("span.pill.bad", { title: detail }, String(kind).replaceAll("_", " ")),
    ),
    own.replies.map((reply) => h(".reply", {}, clippable(reply, ".prose", LETTERS))),
  );
}
