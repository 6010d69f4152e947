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
    isModel &&
      item(
        "log-prob",
        isNumber(logProb) ? `${number(logProb)} (${share(Math.exp(logProb))})` : "none from the server",
      ),
    item(
      "trainer",
      isModel && isNumber(trainLogProbs?.[token])
        ? number(trainLogProbs[token])
        : whyNoTrainer(trajectory, block, isModel),
    ),
    isNumber(difference) && item("difference", signed(difference)),
    isModel && isNumber(advantages?.[token]) && item("advantage", signed(advantages[token])),
    versions[token] >= 0 && item("weights", `version ${versions[token]}`),
  ];
}

const item = (label, value) => h("span.item", {}, h("span.muted", {}, `${label} `), value);

/** Returns the reason why the trainer has no log-prob of a token. */
function whyNoTrainer({ meta, trainLogProbs }, block, isModel) {
  if (!isModel && block?.origin === "model") return "none: a grammar forced this token";
  if (!isModel) return "none: the model did not sample this token";
  if (trainLogProbs) return "none for this token";
  if (meta.split !== "train") return `none: trajectories of ${meta.split} are not trained on`;
  if (meta.failure) return "none: the trajectory failed, and was not trained on";
  if (typeof meta.advantage !== "number") return "none: the trajectory was not trained on";
  return "none: the trainer did not compute log-probs before the update";
}
