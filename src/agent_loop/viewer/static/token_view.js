// View of all tokens of a trajectory, coloured, with the details of the token under the pointer or the cursor.

import { blockHead } from "./block_head.js";
import { h, replaceChildren } from "./dom.js";
import { adjust } from "./router.js";
import { colorings } from "./token_colors.js";
import { tokenDetails } from "./token_details.js";
import { lineOfToken, tokenLines } from "./token_lines.js";
import { VirtualRows } from "./virtual_rows.js";

const LINE_HEIGHT = 22;
const PADDING = 26;

export class TokenView {
  #trajectory;
  #lines = [];
  #columns = 0;
  #cursor = null;
  #wanted;

  constructor(trajectory, { color, token }) {
    this.#trajectory = trajectory;
    this.colorings = colorings(trajectory);
    this.color = this.colorings[color] ? color : "origin";
    this.details = h(".token-details", {
      role: "status",
      tabindex: "0",
      "aria-label": "The token under the pointer",
    });
    this.legend = h(".legend");
    this.rows = new VirtualRows({
      render: (line) => this.#lineOf(line),
      rowHeight: LINE_HEIGHT,
      label: "Tokens; arrow keys move along them",
      role: "region",
    });
    this.rows.element.classList.add("tokens");
    this.rows.element.addEventListener("pointerover", (event) => this.#hover(event));
    this.rows.element.addEventListener("click", (event) => this.#select(tokenOf(event.target)));
    this.rows.element.addEventListener("keydown", (event) => this.#move(event));
    this.element = h(
      ".token-view",
      {},
      h(".token-tools", {}, this.#switch(), this.legend),
      this.rows.element,
      this.details,
    );
    this.#wanted = token;
    this.setColor(this.color);
    new ResizeObserver(() => this.#fit()).observe(this.rows.element);
    this.#describe(null);
  }

  /** Shows the colour scheme and the token that the address names. */
  follow({ color, token }) {
    const name = this.colorings[color] ? color : "origin";
    if (name !== this.color) {
      this.element.querySelector(`input[value=${name}]`).checked = true;
      this.setColor(name);
    }
    if (token !== null && token !== this.#cursor) this.reveal(token);
  }

  setColor(name) {
    this.color = name;
    const { legend } = this.colorings[name];
    replaceChildren(
      this.legend,
      legend.map((entry) =>
        h("span.key", {}, h(`span.swatch.${entry.class}`, { "aria-hidden": "true" }), entry.label),
      ),
    );
    if (this.#lines.length) this.rows.reset(this.#lines.length);
  }

  /** Switches to the next colour scheme. */
  cycle() {
    const names = Object.keys(this.colorings);
    this.#choose(names[(names.indexOf(this.color) + 1) % names.length]);
  }

  /** Scrolls to a token and moves the cursor to it. */
  reveal(token) {
    if (!this.#lines.length) {
      this.#wanted = token;
      return;
    }
    this.rows.reveal(lineOfToken(this.#lines, token), { center: true });
    this.#select(token);
  }

  #choose(name) {
    this.element.querySelector(`input[value=${name}]`).checked = true;
    this.setColor(name);
    adjust({ color: name });
  }

  #switch() {
    return h(
      "fieldset.switch",
      {},
      h("legend.visually-hidden", {}, "Colour tokens by"),
      Object.entries(this.colorings).map(([name, { label }]) =>
        h(
          "label",
          {},
          h("input", {
            type: "radio",
            name: "color",
            value: name,
            checked: name === this.color,
            onchange: () => this.#choose(name),
          }),
          h("span", {}, label),
        ),
      ),
    );
  }

  #fit() {
    const columns = Math.max(
      20,
      Math.floor((this.rows.element.clientWidth - PADDING) / letterWidth(this.rows.element)),
    );
    if (columns === this.#columns) return;
    const first = this.#firstInSight();
    this.#columns = columns;
    this.#lines = tokenLines(this.#trajectory, columns);
    this.rows.reset(this.#lines.length);
    const wanted = this.#wanted ?? first;
    this.#wanted = null;
    if (wanted !== null) this.reveal(wanted);
  }

  #firstInSight() {
    const line = this.#lines[Math.ceil(this.rows.element.scrollTop / LINE_HEIGHT)];
    return line && this.rows.element.scrollTop ? (line.block?.start ?? line.tokens[0]) : null;
  }

  #lineOf(number) {
    const line = this.#lines[number];
    if (line.block) return blockHead(line.block, this.#trajectory);
    const { classOf } = this.colorings[this.color];
    const element = document.createElement("div");
    element.className = "row token-line";
    line.tokens.forEach((token, place) => {
      const span = document.createElement("span");
      span.className = token === this.#cursor ? `t ${classOf(token)} at-cursor` : `t ${classOf(token)}`;
      span.dataset.token = token;
      span.textContent = line.texts[place];
      element.append(span);
    });
    return element;
  }

  #hover(event) {
    const token = tokenOf(event.target);
    if (token !== null) this.#describe(token);
  }

  #select(token) {
    if (token === null) return;
    this.rows.element.querySelectorAll(".at-cursor").forEach((span) => span.classList.remove("at-cursor"));
    this.#cursor = token;
    this.rows.element
      .querySelectorAll(`[data-token="${token}"]`)
      .forEach((span) => span.classList.add("at-cursor"));
    this.#describe(token);
    adjust({ token: String(token) });
  }

  #move(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const next = Math.min(Math.max(0, (this.#cursor ?? -1) + by), this.#trajectory.length - 1);
    this.rows.reveal(lineOfToken(this.#lines, next));
    this.#select(next);
  }

  #describe(token) {
    replaceChildren(
      this.details,
      token === null ? h("span.muted", {}, "Point at a token.") : tokenDetails(this.#trajectory, token),
    );
  }
}

function tokenOf(element) {
  const token = element.dataset?.token;
  return token === undefined ? null : Number(token);
}

function letterWidth(parent) {
  const probe = parent.appendChild(h("span.t.probe", { "aria-hidden": "true" }, "x".repeat(100)));
  const width = probe.getBoundingClientRect().width / 100;
  probe.remove();
  return width || 8;
}
