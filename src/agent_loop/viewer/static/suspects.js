// Suspicious tokens: the largest log-prob differences between trainer and rollout, and the least likely tokens.

import { h } from "./dom.js";
import { isNumber, number, share, signed } from "./format.js";

const SHOWN = 6;

export function suspects(trajectory, onToken) {
  const { logProbs, mask, ids, pieces } = trajectory;
  const lists = [];
  const differing = largest(trajectory, (token) => Math.abs(trajectory.difference(token)), 1e-3);
  if (differing.length)
    lists.push(["Trainer and rollout differ", differing, (token) => signed(trajectory.difference(token))]);
  if (logProbs) {
    const unlikely = largest(trajectory, (token) => (mask[token] ? -logProbs[token] : NaN), 0.7);
    if (unlikely.length) lists.push(["Least likely", unlikely, (token) => share(Math.exp(logProbs[token]))]);
  }
  return lists.map(([title, tokens, valueOf]) => [
    h("h3", {}, title),
    h(
      "ul.suspects",
      {},
      tokens.map((token) =>
        h(
          "li",
          {},
          h(
            "button.link",
            { onclick: () => onToken(token), "aria-label": `Token ${token}: ${pieces.of(ids[token])}` },
            h("code", {}, JSON.stringify(pieces.of(ids[token])).slice(1, -1) || "·"),
            h("span.muted", {}, `at ${number(token)}`),
            h("span", {}, valueOf(token)),
          ),
        ),
      ),
    ),
  ]);
}

function largest({ length }, valueOf, least) {
  const best = [];
  for (let token = 0; token < length; token++) {
    const value = valueOf(token);
    if (!isNumber(value) || value < least || (best.length === SHOWN && value <= best.at(-1).value)) continue;
    best.push({ token, value });
    best.sort((one, other) => other.value - one.value);
    best.length = Math.min(best.length, SHOWN);
  }
  return best.map(({ token }) => token);
}
