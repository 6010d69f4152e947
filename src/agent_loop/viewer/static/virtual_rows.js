// Long list of rows of equal height. Only visible rows are in the document.

import { h, oncePerFrame } from "./dom.js";

const SPARE = 5;

export class VirtualRows {
  #render;
  #rowHeight;
  #count = 0;
  #shown = new Map();
  #body;
  #measured = 0;

  /**
   * @param render  Returns the element of a row by its number.
   * @param rowHeight  Height of a row in pixels.
   */
  constructor({ render, rowHeight, label, role = "list", bodyRole = "presentation", head = null }) {
    this.#render = render;
    this.#rowHeight = rowHeight;
    this.#body = h(".rows", { role: bodyRole });
    this.element = h(".scroller", { role, tabindex: "0", "aria-label": label }, head, this.#body);
    const draw = oncePerFrame(() => this.draw());
    this.element.addEventListener("scroll", draw, { passive: true });
    new ResizeObserver(() => {
      this.#measured = 0;
      draw();
    }).observe(this.element);
  }

  get count() {
    return this.#count;
  }

  get #height() {
    this.#measured ||= this.element.clientHeight;
    return this.#measured;
  }

  /** Sets the number of rows and redraws all of them. */
  reset(count) {
    this.#count = count;
    this.#body.style.height = `${count * this.#rowHeight}px`;
    this.#shown.clear();
    this.#body.replaceChildren();
    this.draw();
  }

  /** Draws the visible rows that are missing. */
  draw() {
    const top = this.element.scrollTop;
    const first = Math.max(0, Math.floor(top / this.#rowHeight) - SPARE);
    const last = Math.min(this.#count, Math.ceil((top + this.#height) / this.#rowHeight) + SPARE);
    for (const [row, element] of this.#shown) {
      if (row < first || row >= last) {
        element.remove();
        this.#shown.delete(row);
      }
    }
    const added = document.createDocumentFragment();
    for (let row = first; row < last; row++) {
      if (this.#shown.has(row)) continue;
      const element = this.#render(row);
      element.style.top = `${row * this.#rowHeight}px`;
      this.#shown.set(row, element);
      added.append(element);
    }
    this.#body.append(added);
  }

  /** Returns the element of a row, if it is visible. */
  elementOf(row) {
    return this.#shown.get(row);
  }

  reveal(row, { center = false } = {}) {
    const top = row * this.#rowHeight;
    const head = this.#body.offsetTop;
    const room = this.element.clientHeight - head;
    if (center) this.element.scrollTop = top - room / 2;
    else if (top < this.element.scrollTop) this.element.scrollTop = top;
    else if (top + this.#rowHeight > this.element.scrollTop + room) {
      this.element.scrollTop = top + this.#rowHeight - room;
    }
    this.draw();
  }
}
