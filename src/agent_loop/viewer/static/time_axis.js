// Time axis above the bars. Dragging along it selects a range.

import { niceTicks } from "./chart.js";
import { h, replaceChildren } from "./dom.js";
import { seconds } from "./format.js";

const TICKS = 8;
const LEAST_SHARE = 1 / 200;

export class TimeAxis {
  #range = { from: 0, to: 1 };
  #choose;

  /** @param choose  Called with the selected range, `{from, to}` in seconds, or with null for the whole range. */
  constructor(choose) {
    this.#choose = choose;
    this.label = h(".axis-label");
    this.line = h(".axis-line");
    this.line.addEventListener("pointerdown", (event) => this.#drag(event));
    this.element = h(".time-axis", {}, this.label, this.line);
  }

  draw(range, isPart) {
    this.#range = range;
    const { from, to } = range;
    const all = () => this.#choose(null);
    replaceChildren(
      this.label,
      isPart ? h("button.link", { onclick: all }, "show all") : h("span.muted", {}, "drag to zoom"),
    );
    replaceChildren(
      this.line,
      niceTicks(from, to, TICKS).map((tick) =>
        h("span.axis-tick", { style: { left: percent((tick - from) / (to - from)) } }, seconds(tick)),
      ),
    );
  }

  #drag(event) {
    const box = this.line.getBoundingClientRect();
    const shareAt = ({ clientX }) => Math.min(1, Math.max(0, (clientX - box.left) / box.width));
    const begun = shareAt(event);
    const sorted = (other) => [begun, shareAt(other)].sort((one, two) => one - two);
    const mark = this.line.appendChild(h("span.axis-mark"));
    const move = (moved) => {
      const [low, high] = sorted(moved);
      mark.style.left = percent(low);
      mark.style.width = percent(high - low);
    };
    const end = (ended) => {
      document.removeEventListener("pointermove", move);
      mark.remove();
      const [low, high] = sorted(ended);
      const { from, to } = this.#range;
      if (high - low > LEAST_SHARE)
        this.#choose({ from: from + low * (to - from), to: from + high * (to - from) });
    };
    document.addEventListener("pointermove", move);
    document.addEventListener("pointerup", end, { once: true });
    event.preventDefault();
  }
}

const percent = (share) => `${100 * share}%`;
