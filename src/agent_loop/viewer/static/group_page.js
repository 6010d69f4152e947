// The trajectories of a group side by side, from their first difference.

import { commonLength } from "./branches.js";
import { h, replaceChildren } from "./dom.js";
import { number, plural, seconds } from "./format.js";
import { address, go } from "./router.js";
import { siblingRows, toneOf } from "./siblings.js";
import { Trajectory } from "./trajectory.js";
import { firstDifference, turnRows, turnsOf } from "./turn_grid.js";

const MOST = 16;

export function groupPage(run, parameters) {
  return new GroupPage(run, parameters);
}

class GroupPage {
  #run;
  #key = "";
  #stop;
  #current = 0;

  constructor(run, parameters) {
    this.#run = run;
    this.split = parameters.get("split") ?? "";
    this.step = Number(parameters.get("step"));
    this.group = Number(parameters.get("group"));
    this.intro = h("p.muted", {}, "Loading…");
    this.grid = h(".siblings-grid", { tabindex: "0", role: "region", "aria-label": "Siblings side by side" });
    this.element = h(
      ".page.fills",
      {},
      h(
        ".toolbar",
        {},
        h("h1", {}, h("span.muted", {}, `${this.split} step ${this.step} · `), `group ${this.group}`),
      ),
      this.intro,
      this.grid,
    );
    this.keys = [
      { keys: ["ArrowRight", "]"], about: "next sibling", action: () => this.#move(1) },
      { keys: ["ArrowLeft", "["], about: "previous sibling", action: () => this.#move(-1) },
      { keys: ["Enter", "o"], about: "open the sibling", action: () => this.#open() },
      { keys: ["Escape", "u"], about: "back", action: () => history.back() },
    ];
    this.#stop = run.onChange((what) => what === "table" && this.#load());
    this.#load();
  }

  update(parameters) {
    return ["split", "step", "group"].every((name) => parameters.get(name) === String(this[name]));
  }

  leave() {
    this.#stop();
  }

  async #load() {
    const { table, source } = this.#run;
    const rows = siblingRows(table, this);
    const ids = rows.map((row) => table.value("trajectory_id", row));
    if (!ids.length || ids.join() === this.#key) return;
    this.#key = ids.join();
    const tones = rows.map((row) => toneOf(table, row));
    const columns = [];
    for (const [place, id] of ids.slice(0, MOST).entries()) {
      try {
        const trajectory = new Trajectory(
          await source.trajectory({ split: this.split, step: this.step, id }),
        );
        columns.push({ id, tone: tones[place], trajectory, turns: turnsOf(trajectory) });
      } catch (error) {
        columns.push({ id, tone: tones[place], error: error.message, turns: [] });
      }
    }
    this.#draw(columns, ids.length);
  }

  #draw(columns, count) {
    const loaded = columns.filter((column) => column.trajectory);
    const common =
      loaded.length > 1
        ? Math.min(...loaded.map((one) => commonLength(one.trajectory.ids, loaded[0].trajectory.ids)))
        : 0;
    const promptLength = loaded[0]?.trajectory.promptLength ?? 0;
    const parting = firstDifference(loaded);
    replaceChildren(
      this.intro,
      `${plural(count, "sibling")}. The first ${plural(common, "token")} are equal, ${number(Math.max(0, common - promptLength))} of them after the prompt; `,
      parting === null ? "all turns are equal." : `the first difference is in turn ${parting + 1}.`,
      count > MOST && ` The first ${MOST} are shown.`,
    );
    this.grid.style.setProperty("--siblings", columns.length);
    replaceChildren(
      this.grid,
      columns.map((column, place) => this.#headOf(column, place)),
      turnRows(columns, { leader: loaded[0], parting }),
    );
    this.#mark();
  }

  #headOf({ id, tone, trajectory, error }, place) {
    const meta = trajectory?.meta;
    return h(
      `.sibling-head.${tone}`,
      { "data-place": place },
      h(
        "a",
        { href: address("trajectory", { split: this.split, step: this.step, id }) },
        id.replace(/^group=\d+\//, ""),
      ),
      h("b", {}, meta ? `reward ${number(meta.reward)}` : ""),
      h(
        "span.muted",
        {},
        meta
          ? `${String(meta.stop_reason).replaceAll("_", " ")} · ${plural(trajectory.length - trajectory.promptLength, "token")} · ${seconds(meta.seconds)}`
          : error,
      ),
    );
  }

  #move(by) {
    const count = this.grid.querySelectorAll(".sibling-head").length;
    this.#current = (this.#current + by + count) % Math.max(1, count);
    this.#mark();
  }

  #mark() {
    this.grid.querySelectorAll(".sibling-head").forEach((head, place) => {
      head.classList.toggle("current", place === this.#current);
      if (place === this.#current) head.scrollIntoView({ inline: "nearest", block: "nearest" });
    });
  }

  #open() {
    const link = this.grid.querySelectorAll(".sibling-head a")[this.#current];
    if (link) go(link.getAttribute("href"));
  }
}
