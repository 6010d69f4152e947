// Details of one token.

import { h } from "./dom.js";
import { isNumber, number, share, signed } from "./format.js";

export function tokenDetails(trajectory, token) {
  const { ids, mask, logProbs, trainLogProbs, advantages, versions, promptLength } = trajectory;
  const block = trajectory.blockAt(token);
  const logProb = logProbs?.[token];
  const isModel = mask[token] === 1;
  const difference = trajectory.difference(token);
  return [
    item("token", h("code", {}, JSON.stringify(trajectory.pieces.of(ids[token])))),
    item("id", ids[token]),
    item(
      "position",
      token < promptLength ? `${token} of the prompt` : `${token} · ${token - promptLength} of the response`,
    ),
    item("origin", block ? `${block.origin}${block.turn ? `, turn ${block.turn}` : ""}` : "–"),
    item("mask", mask[token]),
    isModel && isNumber(logProb) && item("log-prob", `${number(logProb)} (${share(Math.exp(logProb))})`),
    isModel && isNumber(trainLogProbs?.[token]) && item("trainer", number(trainLogProbs[token])),
    isNumber(difference) && item("difference", signed(difference)),
    isModel && isNumber(advantages?.[token]) && item("advantage", signed(advantages[token])),
    versions[token] >= 0 && item("weights", `version ${versions[token]}`),
  ];
}

const item = (label, value) => h("span.item", {}, h("span.muted", {}, `${label} `), value);
