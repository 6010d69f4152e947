// The trajectories of a group side by side, from their first difference.

import { commonLength } from "./branches.js";
import { clippable } from "./conversation.js";
import { h, replaceChildren } from "./dom.js";
import { contentText, number, plural, seconds } from "./format.js";
import { address, go } from "./router.js";
import { siblingRows, toneOf } from "./siblings.js";
import { Trajectory } from "./trajectory.js";

const MOST = 16;
const LETTERS = 600;

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
    const depth = Math.max(0, ...columns.map(({ turns }) => turns.length));
    this.grid.style.setProperty("--siblings", columns.length);
    replaceChildren(
      this.grid,
      columns.map((column, place) => this.#headOf(column, place)),
      Array.from({ length: depth }, (_, turn) =>
        columns.map((column) => cellOf(column, { turn, leader: loaded[0], isParting: turn === parting })),
      ),
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

/** Returns each turn with its replies. */
function turnsOf(trajectory) {
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
      found.push({ block, text: contentText(message.content), calls: callsOf(message), replies: [] });
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

const wordsOf = (turn) => (turn ? JSON.stringify([turn.text, turn.calls]) : "");

function firstDifference(columns) {
  const depth = Math.max(0, ...columns.map(({ turns }) => turns.length));
  for (let turn = 0; turn < depth; turn++) {
    if (new Set(columns.map(({ turns }) => wordsOf(turns[turn]))).size > 1) return turn;
  }
  return null;
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
    own.calls.map((call) => h(".call-line", {}, clippable(call, "code", LETTERS))),
    block.incidents.map(({ kind, detail }) =>
      h("span.pill.bad", { title: detail }, String(kind).replaceAll("_", " ")),
    ),
    own.replies.map((reply) => h(".reply", {}, clippable(reply, ".prose", LETTERS))),
  );
}
