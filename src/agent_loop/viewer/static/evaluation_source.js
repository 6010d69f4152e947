// Requests for evaluations, their comparisons and their trajectories.

import { address } from "./router.js";
import { getJson, getPacket } from "./request.js";
import { Trajectory } from "./trajectory.js";

export class EvaluationSource {
  #pagesOf;

  /** @param pagesOf  Returns the address of the pages of a run. */
  constructor(pagesOf) {
    this.#pagesOf = pagesOf;
  }

  list() {
    return getJson("api/evaluations");
  }

  scores(keys) {
    return getJson("api/scores", keys.map((key) => ["key", key]));
  }

  evaluation(key, by) {
    return getJson("api/evaluation", { key, by });
  }

  comparison(key, other, by) {
    return getJson("api/comparison", { key, other, by });
  }

  /** Returns the trajectories of a row: `[{split, step, trajectory_id, reward, is_success, ...}]`. */
  samples(key, group) {
    return getJson("api/samples", { key, group });
  }

  async trajectory(key, { split, step, trajectory_id: id }) {
    const path = `${this.#pagesOf(runOf(key))}api/trajectory`;
    return new Trajectory(await getPacket(path, { split, step, id }));
  }

  /** Returns the address of the page of a trajectory. */
  trajectoryAddress(key, { split, step, trajectory_id: id }) {
    return this.#pagesOf(runOf(key)) + address("trajectory", { split, step, id });
  }
}

const runOf = (key) => key.slice(0, key.lastIndexOf("|"));

/** Returns the name of an evaluation: its folder, and the step of a validation. */
export function nameOf({ name, step }) {
  return step === null ? name : `${name} · step ${step}`;
}
