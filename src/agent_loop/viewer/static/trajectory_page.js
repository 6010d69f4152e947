// Page of one trajectory: outcome, conversation, tokens, times and siblings.

import { branchTree } from "./branches.js";
import { conversation } from "./conversation.js";
import { h, replaceChildren } from "./dom.js";
import { number, plural, seconds } from "./format.js";
import { address, adjust, go } from "./router.js";
import { lastShown, selection } from "./selection.js";
import { siblingChips, siblingRows } from "./siblings.js";
import { dataOf, numbersOf, timeOf, whyOf } from "./trajectory_facts.js";
import { suspects } from "./suspects.js";
import { TokenView } from "./token_view.js";
import { Trajectory } from "./trajectory.js";

export function trajectoryPage(run, parameters) {
  return new TrajectoryPage(run, parameters);
}

function viewOf(parameters) {
  return parameters.get("view") === "tokens" ? "tokens" : "conversation";
}

function tokenIn(parameters) {
  return parameters.has("token") ? Number(parameters.get("token")) : null;
}

class TrajectoryPage {
  #run;
  #tokens = null;
  #trajectory = null;
  #stop;
  #isLeft = false;
  #numBranches = 0;

  constructor(run, parameters) {
    this.#run = run;
    this.split = parameters.get("split") ?? "";
    this.step = Number(parameters.get("step"));
    this.id = parameters.get("id") ?? "";
    this.view = viewOf(parameters);
    this.color = parameters.get("color") ?? "origin";
    this.token = tokenIn(parameters);
    this.head = h("header.trajectory-head", {}, h("h1", {}, this.id));
    this.siblings = h("nav.siblings", { "aria-label": "The group" });
    this.content = h(".trajectory-content", {}, h("p.muted", {}, "Loading…"));
    this.aside = h("aside", { "aria-label": "Details" });
    this.tabs = h(".tabs", { role: "tablist", "aria-label": "Views" });
    this.element = h(
      ".page.fills.trajectory-page",
      {},
      this.head,
      this.siblings,
      h(".split", {}, h(".pane", {}, this.tabs, this.content), this.aside),
    );
    this.keys = this.#keyBindings();
    this.#stop = run.onChange((what) => {
      if (what !== "table") return;
      this.#drawSiblings();
      this.#drawBranches();
    });
    this.#drawSiblings();
    this.#load();
  }

  update(parameters) {
    const same = ["split", "step", "id"].every((name) => parameters.get(name) === String(this[name]));
    if (!same || viewOf(parameters) !== this.view) return false;
    this.color = parameters.get("color") ?? "origin";
    this.token = tokenIn(parameters);
    if (this.view === "tokens" && this.#tokens) this.#tokens.follow(this);
    this.#drawSiblings();
    return true;
  }

  leave() {
    this.#stop();
    this.#isLeft = true;
  }

  async #load() {
    const { split, step, id } = this;
    try {
      this.#trajectory = new Trajectory(await this.#run.source.trajectory({ split, step, id }));
    } catch (error) {
      replaceChildren(this.content, h("p.empty", { role: "alert" }, error.message));
      return;
    }
    if (this.#isLeft) return; // the user has moved to another page
    this.#drawHead();
    this.#drawAside();
    this.#show(this.view);
    this.#drawBranches();
  }

  #drawHead() {
    const { meta } = this.#trajectory;
    const tone = meta.failure
      ? "failed"
      : meta.is_success
        ? "good"
        : meta.is_success === false
          ? "bad"
          : "plain";
    replaceChildren(
      this.head,
      h("a.back", { href: lastShown.address, title: "Back to the table (Esc)" }, "←"),
      h("h1", {}, h("span.muted", {}, `${this.split} step ${this.step} · `), this.id),
      h(`span.verdict.${tone}`, {}, meta.failure ? "failed" : `reward ${number(meta.reward)}`),
      h("span.verdict.plain", {}, String(meta.stop_reason ?? "").replaceAll("_", " ")),
      h(
        "span.muted.facts",
        {},
        [
          plural(meta.num_assistant_turns ?? this.#trajectory.turns.length, "turn"),
          plural(this.#trajectory.length, "token"),
          meta.num_tool_calls ? plural(meta.num_tool_calls, "call") : null,
          seconds(meta.seconds),
        ]
          .filter((part) => part && part !== "–")
          .join(" · "),
      ),
      h(".spacer"),
      h(
        "a.button",
        { href: address("group", { split: this.split, step: this.step, group: meta.group }) },
        "Compare siblings",
      ),
      h("a.button", { href: address("time", { split: this.split, step: this.step }) }, "Time line of the step"),
    );
  }

  /** The part of the address that stays the same on the pages of other trajectories. */
  get #shared() {
    return this.view === "tokens" ? { view: "tokens", color: this.color } : {};
  }

  #drawSiblings() {
    const group = this.#trajectory?.meta.group ?? Number(/group=(\d+)/.exec(this.id)?.[1]);
    const rows = siblingRows(this.#run.table, { split: this.split, step: this.step, group });
    const keep = this.#shared;
    replaceChildren(
      this.siblings,
      rows.length > 0 && h("span.muted", {}, `group ${group}`),
      siblingChips(this.#run.table, rows, { split: this.split, step: this.step, id: this.id, keep }),
    );
  }

  #show(view) {
    this.view = view;
    adjust({ view: view === "tokens" ? "tokens" : null });
    const tab = (name, label) =>
      h(
        "button.tab",
        {
          role: "tab",
          id: `tab-${name}`,
          "aria-selected": String(name === view),
          "aria-controls": "panel",
          onclick: () => this.#show(name),
        },
        label,
      );
    replaceChildren(this.tabs, tab("conversation", "Conversation"), tab("tokens", "Tokens"));
    replaceChildren(
      this.content,
      h(".panel", { role: "tabpanel", id: "panel", "aria-labelledby": `tab-${view}` }, this.#panel(view)),
    );
    this.#drawSiblings();
  }

  #panel(view) {
    if (view === "conversation") {
      const scroller = h(".conversation-scroller", {
        tabindex: "0",
        role: "region",
        "aria-label": "Conversation",
      });
      replaceChildren(
        scroller,
        whyOf(this.#trajectory),
        conversation(this.#trajectory, {
          onTokens: (token) => this.#showToken(token),
          forkOf: (turn) => address("fork", { split: this.split, step: this.step, id: this.id, turn }),
        }),
      );
      return scroller;
    }
    this.#tokens = new TokenView(this.#trajectory, { color: this.color, token: this.token });
    return this.#tokens.element;
  }

  #showToken(token) {
    this.token = token;
    if (this.view === "tokens") this.#tokens.reveal(token);
    else this.#show("tokens");
  }

  #drawAside() {
    this.branches = h(".branches-place");
    replaceChildren(
      this.aside,
      timeOf(this.#trajectory),
      this.branches,
      numbersOf(this.#trajectory),
      suspects(this.#trajectory, (token) => this.#showToken(token)),
      dataOf(this.#trajectory),
    );
  }

  async #drawBranches() {
    const { table } = this.#run;
    const { group, rollout, branch } = this.#trajectory?.meta ?? {};
    if (branch === null || branch === undefined) return;
    const rows = siblingRows(table, { split: this.split, step: this.step, group });
    const own = rows.filter((row) => table.value("rollout", row) === rollout);
    if (own.length === this.#numBranches) return;
    this.#numBranches = own.length;
    const tree = await branchTree(this.#run, this, own).catch((error) => h("p.muted", {}, error.message));
    replaceChildren(this.branches, tree);
  }

  #step(by) {
    const links = [...this.siblings.querySelectorAll("a")];
    const place = links.findIndex((link) => link.getAttribute("aria-current"));
    const link = links[(place + by + links.length) % links.length];
    if (link) go(link.getAttribute("href"));
  }

  #beside(by) {
    const { table } = this.#run;
    const own = selection.rows.find(
      (row) =>
        table.value("trajectory_id", row) === this.id &&
        table.value("step", row) === this.step &&
        table.value("split", row) === this.split,
    );
    const row = own === undefined ? null : selection.beside(own, by);
    if (row === null) return;
    const [split, step, id] = ["split", "step", "trajectory_id"].map((name) => table.value(name, row));
    go(address("trajectory", { split, step, id, ...this.#shared }));
  }

  #keyBindings() {
    return [
      { keys: ["]", "ArrowRight"], about: "next sibling", action: () => this.#step(1) },
      { keys: ["[", "ArrowLeft"], about: "previous sibling", action: () => this.#step(-1) },
      { keys: ["n"], about: "next in the table", action: () => this.#beside(1) },
      { keys: ["p"], about: "previous in the table", action: () => this.#beside(-1) },
      {
        keys: ["t"],
        about: "conversation or tokens",
        action: () => this.#show(this.view === "tokens" ? "conversation" : "tokens"),
      },
      {
        keys: ["c"],
        about: "next colour scheme",
        action: () => this.view === "tokens" && this.#tokens?.cycle(),
      },
      {
        keys: ["s"],
        about: "siblings side by side",
        action: () => this.element.querySelector("a.button")?.click(),
      },
      { keys: ["Escape", "u"], about: "back to the table", action: () => go(lastShown.address) },
    ];
  }
}
