// Samples of a row in two evaluations: their conversations beside each other.

import { h, replaceChildren } from "./dom.js";
import { contentText, number } from "./format.js";
import { firstDifference, turnRows, turnsOf } from "./turn_grid.js";

export class SamplePair {
  #source;
  #sides;
  #load = 0;

  /** @param sides  `[{key, group, name}]`, one or two. One side shows its first two samples. */
  constructor(source, sides) {
    this.#source = source;
    this.#sides = sides;
    /** Text of the last message of the prompt; empty until the samples are loaded. */
    this.prompt = "";
    this.choices = h(".tables");
    this.note = h("p.muted", {}, "Loading…");
    this.grid = h(".pair-grid", { tabindex: "0", role: "region", "aria-label": "Conversations side by side" });
    this.element = h("div", {}, this.choices, this.note, this.grid);
  }

  /** Loads the samples, and shows one of each side that explains the change if there is one. */
  async load() {
    try {
      for (const side of this.#sides) side.samples = await this.#source.samples(side.key, side.group);
      if (this.#sides.length === 1) this.#sides = [0, 1].map((sample) => ({ ...this.#sides[0], sample }));
      else this.#chooseSamples();
      this.#sides = this.#sides.filter((side) => side.samples.length > side.sample);
      await this.#show();
    } catch (error) {
      this.note.textContent = error.message;
    }
  }

  /** Chooses a success of the better side and a failure of the other one. */
  #chooseSamples() {
    const shares = this.#sides.map(({ samples }) => samples.filter((one) => one.is_success).length / samples.length);
    const wanted = [shares[0] > shares[1], shares[1] >= shares[0]];
    this.#sides.forEach((side, place) => {
      side.sample = Math.max(0, side.samples.findIndex((one) => Boolean(one.is_success) === wanted[place]));
    });
  }

  async #show() {
    const load = ++this.#load;
    replaceChildren(this.choices, this.#sides.map((side) => this.#choice(side)));
    if (!this.#sides.length) {
      this.note.textContent = "No trajectories of this row are stored.";
      return;
    }
    const columns = [];
    for (const side of this.#sides) {
      const trajectory = await this.#source.trajectory(side.key, side.samples[side.sample]);
      columns.push({ side, trajectory, turns: turnsOf(trajectory) });
    }
    if (load !== this.#load) return;
    this.prompt = promptOf(columns[0].trajectory);
    const parting = firstDifference(columns);
    this.note.textContent =
      columns.length < 2 ? "" : parting === null ? "All turns are equal." : `The first difference is in turn ${parting + 1}.`;
    replaceChildren(
      this.grid,
      columns.map(({ side }) => this.#head(side)),
      turnRows(columns, { leader: columns[0], parting }),
    );
  }

  #head({ key, name, samples, sample }) {
    const one = samples[sample];
    return h(
      `.sibling-head.${one.is_success ? "good" : "bad"}`,
      {},
      h("a", { href: this.#source.trajectoryAddress(key, one) }, `${name} · sample ${one.rollout}`),
      h("b", {}, `reward ${number(one.reward)}`),
      h("span.muted", {}, String(one.stop_reason).replaceAll("_", " ")),
    );
  }

  #choice(side) {
    const choose = (place) => {
      side.sample = place;
      this.#show();
    };
    return h(
      ".chips",
      { role: "group", "aria-label": `Samples of ${side.name}` },
      h("span.muted", {}, side.name),
      side.samples.map((one, place) =>
        h(
          "button.chip",
          { "aria-pressed": String(place === side.sample), onclick: () => choose(place) },
          `${one.rollout}: ${number(one.reward)}`,
        ),
      ),
    );
  }
}

function promptOf({ messages, turns }) {
  const first = turns[0]?.message;
  const end = first ? messages.indexOf(first) : turns.length ? 0 : messages.length;
  return contentText(messages[end - 1]?.content);
}
