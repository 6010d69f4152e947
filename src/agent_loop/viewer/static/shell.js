// Frame of all pages: header with menu and status, notice, and the page that the address names.

import { forgetCharts } from "./chart.js";
import { themeSwitch } from "./color_theme.js";
import { h, replaceChildren } from "./dom.js";
import { listenToKeys, setKeys, showHelp } from "./keys.js";
import { address, here, homePage, onChange } from "./router.js";

/** A page is a function of the data and its parameters that returns `{element, keys, update, leave}`. `update` is called
 * with new parameters, and returns false if the page has to be created again. */
export class Shell {
  #pages;
  #menu;
  #partOf;
  #data;
  #shown = null;
  #name = "";

  /**
   * @param pages  Pages by name.
   * @param menu  Labels of the menu, by page.
   * @param partOf  Entry of the menu for pages that have none.
   * @param data  First argument of the pages.
   */
  constructor({ pages, menu, partOf, data }) {
    this.#pages = pages;
    this.#menu = menu;
    this.#partOf = partOf;
    this.#data = data;
    this.main = h("main", { id: "main", tabindex: "-1", "aria-busy": "true" });
    this.menu = h("nav", { "aria-label": "Pages" });
    this.status = h(".status", { role: "status" });
    this.notice = h(".notice", { role: "note", hidden: true });
  }

  /** Adds the frame to the document and shows the page of the address. */
  open() {
    const { up } = document.documentElement.dataset;
    document.body.append(
      h(
        "a.skip",
        { href: "#main", onclick: (event) => (event.preventDefault(), this.main.focus()) },
        "Skip to content",
      ),
      h(
        "header.top",
        {},
        h("a.brand", { href: up ?? address(homePage()) }, up ? "← all runs" : "agent-loop"),
        this.menu,
        this.status,
        h("button.quiet", { onclick: showHelp, "aria-label": "Keys", title: "Keys (?)" }, "?"),
        themeSwitch(),
      ),
      this.notice,
      this.main,
    );
    listenToKeys();
    onChange((place) => this.#show(place));
    this.#show(here());
  }

  /** Shows sentences above the page; nothing if there are none. */
  notify(sentences) {
    const message = sentences.filter(Boolean).join(" ");
    if (this.notice.textContent !== message) this.notice.textContent = message;
    this.notice.hidden = !message;
  }

  /** Adds or removes an entry of the menu. */
  setEntry(page, label) {
    if ((this.#menu[page] ?? null) === label) return;
    const { [page]: _, ...others } = this.#menu;
    this.#menu = label === null ? others : { ...others, [page]: label };
    this.#drawMenu();
  }

  #show({ page, parameters }) {
    if (page === this.#name && this.#shown?.update?.(parameters) !== false && this.#shown?.update) return;
    this.#shown?.leave?.();
    forgetCharts();
    this.#name = page;
    this.#shown = (this.#pages[page] ?? missingPage)(this.#data, parameters);
    replaceChildren(this.main, this.#shown.element);
    setKeys(this.#shown.keys ?? []);
    this.#drawMenu();
    document.title = `${this.#menu[page] ?? page} · agent-loop view`;
    scrollTo(0, 0);
    this.#shown.shown?.();
  }

  #drawMenu() {
    const current = this.#partOf[this.#name] ?? this.#name;
    replaceChildren(
      this.menu,
      Object.entries(this.#menu).map(([page, label]) =>
        h("a", { href: address(page), "aria-current": page === current ? "page" : null }, label),
      ),
    );
  }
}

function missingPage() {
  return {
    element: h(
      "section.empty",
      {},
      h("h1", {}, "Page not found"),
      h("a", { href: address(homePage()) }, "First page"),
    ),
  };
}
