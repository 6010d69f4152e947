// What-if page: edit the text of a turn, run the trajectory from there, and see original and fork side by side.

import { h, replaceChildren } from "./dom.js";
import { forkState, runFork } from "./forks.js";
import { number, plural } from "./format.js";
import { address, go } from "./router.js";
import { Trajectory } from "./trajectory.js";
import { firstDifference, turnRows, turnsOf } from "./turn_grid.js";

export function forkPage(run, parameters) {
  return new ForkPage(run, parameters);
}

class ForkPage {
  #run;
  #original = null;
  #token = null;
  #running = null;

  constructor(run, parameters) {
    this.#run = run;
    this.split = parameters.get("split") ?? "";
    this.step = Number(parameters.get("step"));
    this.id = parameters.get("id") ?? "";
    this.turn = Number(parameters.get("turn") ?? 1);
    const { split, step, id } = this;
    this.back = address("trajectory", { split, step, id });
    this.text = h("textarea.fork-text", {
      rows: "8",
      spellcheck: "false",
      "aria-label": `Text of turn ${this.turn}`,
    });
    this.button = h("button.primary", { disabled: true, onclick: () => this.#start() }, "Run from here");
    this.message = h("p.fork-message", { role: "status" }, "Loading…");
    this.grid = h(".siblings-grid", {
      tabindex: "0",
      role: "region",
      "aria-label": "Original and fork side by side",
    });
    this.grid.style.setProperty("--siblings", 2);
    this.element = h(
      ".page.fills.fork-page",
      {},
      h(
        "header.trajectory-head",
        {},
        h("a.back", { href: this.back, title: "Back to the trajectory (Esc)" }, "←"),
        h("h1", {}, h("span.muted", {}, `${split} step ${step} · `), id),
        h("span", {}, `What if turn ${this.turn} were different?`),
      ),
      this.text,
      h(".toolbar", {}, this.button, this.message),
      this.grid,
    );
    this.keys = [{ keys: ["Escape", "u"], about: "back to the trajectory", action: () => go(this.back) }];
    this.#load();
  }

  update(parameters) {
    return ["split", "step", "id", "turn"].every((name) => parameters.get(name) === String(this[name]));
  }

  leave() {
    this.#running?.abort();
  }

  async #load() {
    const { source } = this.#run;
    try {
      const { split, step, id } = this;
      this.#original = new Trajectory(await source.trajectory({ split, step, id }));
      const block = this.#original.turns[this.turn - 1];
      if (!block) throw new Error(`turn ${this.turn} does not exist`);
      this.text.value = textOf(this.#original, block);
      this.#draw(null);
      const { problem, token } = await forkState(source);
      this.#token = token;
      this.button.disabled = Boolean(problem);
      this.message.textContent =
        problem || "Edit the text. The turns before are replayed, and the model and the tools continue after it.";
    } catch (error) {
      this.message.textContent = error.message;
    }
  }

  async #start() {
    const { split, step, id, turn } = this;
    this.#running = new AbortController();
    this.button.disabled = true;
    this.message.textContent = "Running… The engine is started for each fork, which can take a minute.";
    try {
      const fork = await runFork(
        { split, step, id, turn, text: this.text.value },
        { token: this.#token, signal: this.#running.signal },
      );
      const reason = fork.meta.failure ? `The fork failed: ${fork.meta.failure}` : "The fork is not stored.";
      this.message.textContent = reason;
      this.#draw(fork);
    } catch (error) {
      this.message.textContent = error.message;
    }
    this.button.disabled = false;
  }

  /** Shows the turns from the edited one on. */
  #draw(fork) {
    const columns = [
      { name: "Original", trajectory: this.#original },
      { name: "Fork", trajectory: fork },
    ].map((column) => ({ ...column, turns: this.#turnsFrom(column.trajectory) }));
    const [leader] = columns;
    const parting = fork ? firstDifference(columns) : null;
    replaceChildren(this.grid, columns.map(headOf), turnRows(columns, { leader, parting }));
  }

  #turnsFrom(trajectory) {
    return trajectory ? turnsOf(trajectory).slice(this.turn - 1) : [];
  }
}

/** Returns the text of a turn with its control tokens, or its message if the texts of the tokens are not known. */
function textOf(trajectory, block) {
  const isKnown = trajectory.meta.pieces?.some((piece) => piece !== null);
  return isKnown ? trajectory.text(block.start, block.end) : String(block.message?.content ?? "");
}

function headOf({ name, trajectory }) {
  const { meta } = trajectory ?? {};
  return h(
    `.sibling-head.${meta?.is_success ? "good" : "plain"}`,
    {},
    h("b", {}, name),
    meta && h("span", {}, `reward ${number(meta.reward)}`),
    meta &&
      h(
        "span.muted",
        {},
        `${String(meta.stop_reason).replaceAll("_", " ")} · ${plural(trajectory.length - trajectory.promptLength, "token")}`,
      ),
  );
}
