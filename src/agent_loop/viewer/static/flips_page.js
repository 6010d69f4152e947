// Two evaluations: differences with intervals, rows that passed in one of them only, and conversations beside each other.

import { h, replaceChildren } from "./dom.js";
import { differenceCell, headOf } from "./evaluations_page.js";
import { nameOf } from "./evaluation_source.js";
import { points } from "./estimates.js";
import { number, plural, signed } from "./format.js";
import { address, adjust } from "./router.js";
import { SamplePair } from "./sample_pair.js";

const WORDS = { pass: "now passes", fail: "now fails", "": "changed" };

/** @param data  Has `evaluations`, an EvaluationSource. */
export function flipsPage(data, parameters) {
  return new FlipsPage(data.evaluations, parameters);
}

class FlipsPage {
  #source;
  #listed = [];
  #found = null;
  #load = 0;

  constructor(source, parameters) {
    this.#source = source;
    this.key = parameters.get("key") ?? "";
    this.other = parameters.get("other") ?? "";
    this.by = parameters.get("by") ?? "";
    this.flip = parameters.get("flip") ?? "";
    this.row = parameters.get("row");
    this.choice = h(".toolbar");
    this.intro = h("p", {}, "Loading…");
    this.tables = h(".tables");
    this.list = h("section", { "aria-label": "Changed rows" });
    this.pair = h("section", { "aria-label": "Conversations" });
    this.element = h(".page", {}, this.choice, this.intro, this.pair, this.tables, this.list);
    this.keys = [
      { keys: ["j", "n"], about: "next changed row", action: () => this.#move(1) },
      { keys: ["k", "p"], about: "previous changed row", action: () => this.#move(-1) },
    ];
    this.#start();
  }

  update(parameters) {
    return ["key", "other"].every((name) => parameters.get(name) === this[name]) &&
      parameters.get("row") === this.row;
  }

  async #start() {
    try {
      this.#listed = await this.#source.list();
      replaceChildren(
        this.choice,
        h("h1", {}, "Flips"),
        this.#select("other", "From"),
        this.#select("key", "To"),
      );
      await this.#compare();
    } catch (error) {
      this.intro.textContent = error.message;
    }
  }

  async #compare() {
    const load = ++this.#load;
    const found = await this.#source.comparison(this.key, this.other, this.by);
    if (load !== this.#load) return;
    this.#found = found;
    this.intro.textContent =
      this.key === this.other
        ? "Choose another evaluation to see which rows changed."
        : `${plural(found.num_rows, "row")} in both: ${plural(found.num_pass, "row passes", "rows pass")} that failed before; ` +
          `${plural(found.num_fail, "row fails", "rows fail")} that passed before. A row passes if at least half of its samples are successes.`;
    replaceChildren(this.tables, found.num_rows > 0 && this.key !== this.other && this.#differences());
    this.#drawList();
    if (this.row !== null) await this.#showPair();
  }

  #differences() {
    const { total, categories } = this.#found;
    const named = [["all", total]];
    for (const [column, values] of Object.entries(categories))
      named.push(...Object.entries(values).map(([name, each]) => [`${column} = ${name}`, each]));
    const choose = (event) => {
      this.by = event.target.value;
      adjust({ by: this.by });
      this.#compare();
    };
    return h(
      "div",
      {},
      h("h3", {}, "Better by, with 95 % intervals"),
      h(
        "table.plain",
        {},
        h("caption.visually-hidden", {}, "Differences"),
        headOf(["rows of", "rows in both", "pass@1", "mean reward"]),
        h(
          "tbody",
          {},
          named.map(([name, each]) =>
            h(
              "tr",
              {},
              h("th", { scope: "row" }, name),
              h("td.number", {}, number(each.num_rows)),
              differenceCell(each.pass_at_1, points),
              differenceCell(each.mean_reward, signed),
            ),
          ),
        ),
      ),
      this.#found.columns.length > 0 &&
        h(
          "label.inline",
          {},
          "Categories ",
          h(
            "select",
            { onchange: choose },
            ["", ...this.#found.columns].map((name) =>
              h("option", { value: name, selected: name === this.by }, name || "choose a column"),
            ),
          ),
        ),
    );
  }

  #drawList() {
    const { changed, num_changed: count, num_pass: pass, num_fail: fail } = this.#found;
    const shown = this.#shown();
    const chip = (flip, label) =>
      h(
        "button.chip",
        {
          "aria-pressed": String(this.flip === flip),
          onclick: () => {
            this.flip = this.flip === flip ? "" : flip;
            adjust({ flip: this.flip });
            this.#drawList();
          },
        },
        label,
      );
    replaceChildren(
      this.list,
      count > 0 && [
        h("h2", {}, "Rows that changed"),
        h(".chips", {}, chip("pass", `now pass (${number(pass)})`), chip("fail", `now fail (${number(fail)})`)),
        h(
          "table.plain",
          {},
          h("caption.visually-hidden", {}, "Rows that changed"),
          headOf(["row", "prompt", "from", "to", "change"]),
          h("tbody", {}, shown.map((one) => this.#line(one))),
        ),
        count > changed.length && h("p.muted", {}, `The first ${number(changed.length)} of ${number(count)} are listed.`),
      ],
    );
  }

  #shown() {
    return this.#found.changed.filter((one) => !this.flip || one.flip === this.flip);
  }

  #line({ row, other, flip }) {
    const isCurrent = String(row.group) === this.row;
    const of = ({ num_correct: correct, num_samples: samples }) => `${number(correct)} of ${number(samples)}`;
    const tone = flip === "pass" ? ".good" : flip === "fail" ? ".bad" : "";
    return h(
      `tr${isCurrent ? ".current" : ""}`,
      {},
      h("th", { scope: "row" }, h("a", { href: this.#addressOf(row) }, row.group)),
      h("td.long", {}, row.prompt),
      h("td.number", {}, of(other)),
      h("td.number", {}, of(row)),
      h("td", {}, h(`span.pill${tone}`, {}, WORDS[flip])),
    );
  }

  #addressOf({ group }) {
    const { key, other, by, flip } = this;
    return address("flips", { key, other, by, flip, row: group });
  }

  async #showPair() {
    const change = this.#found.changed.find(({ row }) => String(row.group) === this.row);
    const groups = [change?.other.group ?? Number(this.row), change?.row.group ?? Number(this.row)];
    const keys = [this.other, this.key];
    const sides = keys.map((key, place) => ({ key, group: groups[place], name: this.#nameOf(key) }));
    const pair = new SamplePair(this.#source, this.key === this.other ? sides.slice(1) : sides);
    const prompt = h("p.prompt-line.muted", {});
    const show = (text) => {
      prompt.textContent = prompt.title = text ?? "";
    };
    show(change?.row.prompt);
    replaceChildren(this.pair, h("h2", {}, `Row ${this.row}`), prompt, pair.element);
    await pair.load();
    if (!change) show(pair.prompt);
  }

  #move(by) {
    const shown = this.#shown();
    const place = shown.findIndex(({ row }) => String(row.group) === this.row);
    const next = shown[place < 0 ? 0 : place + by];
    if (next) location.hash = this.#addressOf(next.row);
  }

  #nameOf(key) {
    const found = this.#listed.find((one) => one.key === key);
    return found ? nameOf(found) : key;
  }

  #select(name, label) {
    const change = (event) => {
      location.hash = address("flips", { key: this.key, other: this.other, [name]: event.target.value });
    };
    return h(
      "label.inline",
      {},
      label,
      h(
        "select",
        { onchange: change },
        this.#listed.map((one) => h("option", { value: one.key, selected: one.key === this[name] }, nameOf(one))),
      ),
    );
  }
}
