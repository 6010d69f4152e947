// The heading above the tokens of a turn, a reply or the prompt: origin, length, speed, rewards and incidents.

import { h } from "./dom.js";
import { number, plural, seconds, signed } from "./format.js";

export function blockHead(block, trajectory) {
  const element = h(
    ".row.block-head",
    {},
    h(`span.origin.origin-${block.origin}`, {}, nameOf(block)),
    facts(block, trajectory),
  );
  element.dataset.block = trajectory.blocks.indexOf(block);
  return element;
}

export function nameOf({ origin, turn }) {
  return turn ? `turn ${turn}` : origin;
}

export function facts(block, trajectory) {
  const generated = block.spans.filter(({ kind }) => kind === "generate");
  return [
    h("span.muted", {}, plural(block.length, "token")),
    generated.length > 0 && h("span.muted", {}, speedOf(block, generated)),
    versionsOf(block, trajectory),
    block.calls.map((call) => h("span.pill", {}, `${call.name} ${seconds(call.end - call.start)}`)),
    rewards(block),
    incidents(block),
  ];
}

export function rewards({ feedback }) {
  return feedback
    .filter((item) => typeof item?.reward === "number")
    .map(({ reward, name }) =>
      h(`span.pill.${reward > 0 ? "good" : "plain"}`, { title: name }, `reward ${signed(reward)}`),
    );
}

export function incidents(block) {
  return block.incidents.map(({ kind, detail }) =>
    h("span.pill.bad", { title: detail }, String(kind).replaceAll("_", " ")),
  );
}

function speedOf(block, spans) {
  const time = spans.reduce((sum, span) => sum + span.end - span.start, 0);
  const cached = spans.reduce((sum, { details }) => sum + (details.num_cached_tokens ?? 0), 0);
  const preempted = spans.reduce((sum, { details }) => sum + (details.num_preempted ?? 0), 0);
  const parts = [
    seconds(time),
    time > 0 && `${number(Math.round(block.length / time))} tokens/s`,
    spans[0].name,
  ];
  if (cached) parts.push(`${number(cached)} cached`);
  if (preempted) parts.push(`preempted ${preempted}×`);
  return parts.filter(Boolean).join(" · ");
}

function versionsOf(block, { versions }) {
  if (block.origin !== "model" || !block.length) return null;
  const [first, last] = [versions[block.start], versions[block.end - 1]];
  return (
    first >= 0 && h("span.muted", {}, first === last ? `weights ${first}` : `weights ${first} → ${last}`)
  );
}
