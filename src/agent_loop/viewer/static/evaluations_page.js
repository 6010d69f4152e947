// Evaluations: a list with scores, and one of them with its categories and rows.

import { lineChart } from "./chart.js";
import { h, replaceChildren } from "./dom.js";
import { nameOf } from "./evaluation_source.js";
import { estimateText, toneOfDifference } from "./estimates.js";
import { number, share } from "./format.js";
import { address, adjust } from "./router.js";

const MOST_LISTED = 40;
const REASONS = [
  ["stop_reasons", "ended with"],
  ["failures", "failed"],
  ["incidents", "incidents"],
];

/** @param data  Has `evaluations`, an EvaluationSource. */
export function evaluationsPage(data, parameters) {
  return new EvaluationsPage(data.evaluations, parameters);
}

class EvaluationsPage {
  #source;
  #listed = [];
  #scores = {};
  #load = 0;

  constructor(source, parameters) {
    this.#source = source;
    this.key = parameters.get("key");
    this.by = parameters.get("by") ?? "";
    this.list = h("section", { "aria-label": "List of evaluations" }, h("p.muted", {}, "Loading…"));
    this.details = h("section", { "aria-label": "Evaluation" });
    this.element = h(".page", {}, h("h1.visually-hidden", {}, "Evaluations"), this.list, this.details);
    this.keys = [];
    this.#start();
  }

  update(parameters) {
    return (parameters.get("key") ?? this.key) === this.key && (parameters.get("by") ?? "") === this.by;
  }

  async #start() {
    try {
      this.#listed = await this.#source.list();
      if (!this.#listed.length) {
        replaceChildren(this.list, h("p.empty", {}, "There are no evaluations and no stored validations."));
        return;
      }
      this.key ??= (this.#listed.findLast((one) => one.step === null) ?? this.#listed.at(-1)).key;
      const shown = this.#shown();
      this.#scores = await this.#source.scores(shown.map((one) => one.key));
      replaceChildren(this.list, this.#listed.length > 1 && [this.#curve(shown), this.#table(shown)]);
      await this.#showDetails();
    } catch (error) {
      replaceChildren(this.details, h("p.empty", {}, error.message));
    }
  }

  /** Returns the folders of evaluations and the newest validations. */
  #shown() {
    const steps = this.#listed.filter((one) => one.step !== null).sort((a, b) => b.step - a.step);
    const folders = this.#listed.filter((one) => one.step === null);
    const kept = new Set([...folders, ...steps].slice(0, MOST_LISTED));
    return this.#listed.filter((one) => kept.has(one));
  }

  /** Returns a chart of the validations of a run, with intervals as bands. */
  #curve(shown) {
    const names = [...new Set(shown.filter((one) => one.step !== null).map((one) => one.name))];
    const series = names.flatMap((name, color) => {
      const steps = shown.filter((one) => one.name === name && one.step !== null && this.#passAt1(one));
      const estimates = steps.map((one) => this.#passAt1(one));
      const line = {
        label: names.length > 1 ? name : "pass@1",
        steps: steps.map((one) => one.step),
        values: estimates.map(([value]) => value),
        color,
      };
      const ends = [1, 2].map((place) => estimates.map((estimate) => estimate[place] ?? estimate[0]));
      return steps.length > 1 ? [{ ...line, values: ends[1], floor: ends[0], isBand: true }, line] : [];
    });
    if (!series.length) return null;
    const chart = lineChart(series, {
      title: "pass@1 of the validations",
      format: share,
      least: 0,
      most: 1,
      within: [0, 1],
    });
    return h(".charts", {}, chart);
  }

  #passAt1({ key }) {
    return this.#scores[key]?.pass_at_k?.[1] ?? null;
  }

  #table(shown) {
    const ks = [...new Set(shown.flatMap(({ key }) => Object.keys(this.#scores[key]?.pass_at_k ?? {})))].map(Number);
    const most = Math.max(1, ...ks);
    const heads = ["evaluation", "rows", "samples", "pass@1", most > 1 && `pass@${most}`, "mean reward", "compare"];
    return [
      h(
        ".wide",
        { tabindex: "0", role: "region", "aria-label": "Evaluations" },
        h(
          "table.plain",
          {},
          h("caption.visually-hidden", {}, "Evaluations, with 95 % intervals"),
          headOf(heads.filter(Boolean)),
          h("tbody", {}, shown.map((one) => this.#row(one, most))),
        ),
      ),
      h("p.muted", {}, "The values in parentheses are 95 % intervals."),
    ];
  }

  #row(one, most) {
    const scores = this.#scores[one.key] ?? {};
    const isCurrent = one.key === this.key;
    return h(
      `tr${isCurrent ? ".current" : ""}`,
      {},
      h(
        "th",
        { scope: "row" },
        h(
          "a",
          { href: address("evaluations", { key: one.key }), "aria-current": isCurrent ? "true" : null },
          nameOf(one),
        ),
      ),
      scores.error
        ? h("td", { colspan: most > 1 ? 5 : 4 }, scores.error)
        : [
            h("td.number", {}, number(scores.num_rows)),
            h("td.number", {}, number(scores.num_samples)),
            h("td.number", {}, estimateText(scores.pass_at_k?.[1], share)),
            most > 1 && h("td.number", {}, estimateText(scores.pass_at_k?.[most], share)),
            h("td.number", {}, estimateText(scores.mean_reward)),
          ],
      h(
        "td",
        {},
        isCurrent
          ? h("span.muted", {}, "shown below")
          : h("a", { href: address("flips", { key: this.key, other: one.key }) }, "flips"),
      ),
    );
  }

  async #showDetails() {
    const load = ++this.#load;
    const found = await this.#source.evaluation(this.key, this.by);
    if (load !== this.#load) return;
    const about = [found.model && `model ${found.model}`, found.rows_of && `rows of ${found.rows_of}`];
    replaceChildren(
      this.details,
      h("h2", {}, nameOf(found), h("span.aside", {}, about.filter(Boolean).join(" · "))),
      h(".tables", {}, totals(found), this.#categories(found)),
      this.#rows(found),
    );
  }

  #categories(found) {
    const choice =
      found.columns.length > 0 &&
      h(
        "label.inline",
        {},
        "Categories ",
        h(
          "select",
          {
            onchange: (event) => {
              this.by = event.target.value;
              adjust({ key: this.key, by: this.by });
              this.#showDetails();
            },
          },
          ["", ...found.columns].map((name) =>
            h("option", { value: name, selected: name === this.by }, name || "choose a column"),
          ),
        ),
      );
    return h("div", {}, choice, Object.entries(found.categories).map(([column, named]) => scoreTable(column, named)));
  }

  #rows({ key, rows, scores, has_trajectories: isStored }) {
    const hidden = scores.num_rows - rows.length;
    const line = (row) =>
      h(
        "tr",
        {},
        h(
          "th",
          { scope: "row" },
          isStored
            ? h("a", { href: address("flips", { key, other: key, row: row.group }) }, row.group)
            : row.group,
        ),
        h("td.long", {}, row.prompt),
        h("td.number", {}, `${number(row.num_correct)} of ${number(row.num_samples)}`),
        h("td.number", {}, number(row.mean_reward)),
      );
    return h(
      "details.more",
      { open: true },
      h("summary", {}, `Rows (${number(scores.num_rows)})`),
      h(
        "table.plain",
        {},
        h("caption.visually-hidden", {}, "Rows"),
        headOf(["row", "prompt", "correct", "mean reward"]),
        h("tbody", {}, rows.map(line)),
      ),
      hidden > 0 && h("p.muted", {}, `and ${number(hidden)} more rows`),
    );
  }
}

function totals(found) {
  const { scores } = found;
  const lines = [
    ["rows", number(scores.num_rows), ""],
    ["samples", number(scores.num_samples), ""],
    scores.num_scored < scores.num_samples && [
      "samples without a score",
      number(scores.num_samples - scores.num_scored),
      "",
    ],
    ["mean reward", ...valueAndInterval(scores.mean_reward, number)],
    ...Object.entries(scores.pass_at_k).map(([k, estimate]) => [`pass@${k}`, ...valueAndInterval(estimate, share)]),
    ...REASONS.flatMap(([name, words]) =>
      Object.entries(found[name]).map(([kind, count]) => [
        `${words} ${kind.replaceAll("_", " ")}`,
        number(count),
        "",
      ]),
    ),
  ];
  return h(
    "table.plain",
    {},
    h("caption.visually-hidden", {}, "Scores"),
    headOf(["measure", "value", "95 % interval"]),
    h(
      "tbody",
      {},
      lines
        .filter(Boolean)
        .map(([name, value, interval]) =>
          h("tr", {}, h("th", { scope: "row" }, name), h("td.number", {}, value), h("td.number", {}, interval)),
        ),
    ),
  );
}

function valueAndInterval(estimate, format) {
  if (!estimate) return ["–", ""];
  const [value, low, high] = estimate;
  return [format(value), low === null ? "" : `${format(low)} to ${format(high)}`];
}

function scoreTable(column, named) {
  const entries = Object.entries(named);
  const ks = [...new Set([1, ...entries.map(([, scores]) => Math.max(...Object.keys(scores.pass_at_k).map(Number)))])];
  ks.sort((a, b) => a - b);
  return h(
    "table.plain.categories",
    {},
    h("caption.visually-hidden", {}, `Scores by ${column}`),
    headOf([column, "rows", "samples", ...ks.map((k) => `pass@${k}`), "mean reward"]),
    h(
      "tbody",
      {},
      entries.map(([name, scores]) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, name),
          h("td.number", {}, number(scores.num_rows)),
          h("td.number", {}, number(scores.num_samples)),
          ks.map((k) => h("td.number", {}, estimateText(scores.pass_at_k[k], share))),
          h("td.number", {}, estimateText(scores.mean_reward)),
        ),
      ),
    ),
  );
}

export function headOf(names) {
  return h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name))));
}

/** Returns a cell with a difference, coloured if its interval does not contain 0. */
export function differenceCell(estimate, format) {
  const tone = toneOfDifference(estimate);
  return h(`td.number${tone ? `.tone-${tone}` : ""}`, {}, estimateText(estimate, format));
}
