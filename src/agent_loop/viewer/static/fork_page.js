// What-if page: edit the text of a turn, run the trajectory from there, and see original and fork side by side.

import { h, replaceChildren } from "./dom.js";
import { forkState, runFork } from "./forks.js";
import { number, plural, seconds } from "./format.js";
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
  #server = "";
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
      const { problem, token, server } = await forkState(source);
      this.#token = token;
      this.#server = server ?? "";
      this.button.disabled = Boolean(problem);
      this.#say(
        problem ||
          `Edit the text. The turns before are replayed, and the model and the tools continue after it. ${this.#server}`,
      );
    } catch (error) {
      this.#say(error.message, { isError: true });
    }
  }

  #say(text, { isError = false } = {}) {
    this.message.textContent = text;
    this.message.classList.toggle("bad", isError);
    this.message.setAttribute("role", isError ? "alert" : "status");
  }

  /** Shows the elapsed seconds until the returned function is called. */
  #showElapsed() {
    const began = Date.now();
    const elapsed = h("span", { "aria-hidden": "true" });
    const show = () => (elapsed.textContent = ` ${seconds(Math.round((Date.now() - began) / 1000))}`);
    this.#say("Running…");
    this.message.append(elapsed, this.#server && `. ${this.#server}`);
    show();
    const timer = setInterval(show, 1000);
    return () => clearInterval(timer);
  }

  async #start() {
    const { split, step, id, turn } = this;
    this.#running = new AbortController();
    this.button.disabled = true;
    const stopClock = this.#showElapsed();
    try {
      const fork = await runFork(
        { split, step, id, turn, text: this.text.value },
        { token: this.#token, signal: this.#running.signal },
      );
      const { failure } = fork.meta;
      this.#say(failure ? `The fork failed: ${failure}` : "The fork is not stored.", { isError: Boolean(failure) });
      this.#draw(fork);
    } catch (error) {
      this.#say(error.message, { isError: true });
    } finally {
      stopClock();
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
  return trajectory.hasTexts ? trajectory.text(block.start, block.end) : String(block.message?.content ?? "");
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
