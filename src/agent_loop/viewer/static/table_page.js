// Page with the table of all trajectories: filter, sort, search, open.

import { choices, describe, defaultColumns } from "./columns.js";
import { linkTo } from "./digest.js";
import { debounced, h, oncePerFrame, replaceChildren } from "./dom.js";
import { NUMBER_FORMS, TEXT_FORMS } from "./filters.js";
import { columnHistogram } from "./histogram.js";
import { listenToPopovers } from "./popovers.js";
import { quickChips } from "./quick_filters.js";
import { adjust, go, here } from "./router.js";
import { lastShown, Search, selection, sortOf } from "./selection.js";
import { summaryOf } from "./summary.js";
import { fillRow, rowTemplate } from "./table_row.js";
import { VirtualRows } from "./virtual_rows.js";

const ROW_HEIGHT = 27;
const PAGE_ROWS = 20;

export function tablePage(run, parameters) {
  return new TablePage(run, parameters);
}

class TablePage {
  #run;
  #parameters;
  #search = null;
  #columns = [];
  #inputs = new Map();
  #current = 0;
  #stop;
  #stopMenus = listenToPopovers();
  #template = null;
  #redraw = oncePerFrame(() => this.#draw({ keepsPlace: true }));

  constructor(run, parameters) {
    this.#run = run;
    this.#parameters = parameters;
    this.summary = h("p.summary", { role: "status" });
    this.quick = h(".chips", { role: "group", "aria-label": "Quick filters" });
    this.menu = h("details.menu");
    this.headRow = h(".head-row", { role: "row", "aria-rowindex": "1" });
    this.filterRow = h(".filter-row", { role: "row", "aria-rowindex": "2" });
    this.rows = new VirtualRows({
      render: (place) => this.#rowOf(place),
      rowHeight: ROW_HEIGHT,
      label: "Trajectories",
      role: "grid",
      bodyRole: "rowgroup",
      head: h(".head", { role: "rowgroup" }, this.headRow, this.filterRow),
    });
    this.rows.element.classList.add("table");
    this.searchInput = this.#searchInput();
    this.element = h(
      ".page.fills",
      {},
      h("h1.visually-hidden", {}, "Trajectories"),
      h(".toolbar", {}, this.searchInput, this.quick, h(".spacer"), this.menu),
      this.summary,
      this.rows.element,
    );
    this.rows.element.addEventListener("click", (event) => this.#click(event));
    this.keys = this.#keyBindings();
    this.#stop = run.onChange((what) => {
      if (what !== "table") return;
      this.#continueSearch();
      this.#redraw();
    });
    this.#setSearch(parameters.get("q") ?? "");
    this.#draw();
  }

  update(parameters) {
    this.#parameters = parameters;
    this.#draw();
    return true;
  }

  shown() {
    this.rows.reveal(this.#current, { center: true });
  }

  leave() {
    this.#stop();
    this.#stopMenus();
    this.#search?.stop();
  }

  #draw({ keepsPlace = false } = {}) {
    const { table } = this.#run;
    lastShown.address = location.hash || "#/trajectories";
    const opened = selection.rows[this.#current];
    const atTop = keepsPlace ? this.#rowAtTop() : null;
    const rows = selection.compute(table, this.#parameters, this.#search);
    this.#drawHead(table, rows);
    replaceChildren(
      this.quick,
      quickChips(table, (wanted, isOn) => this.#applyQuick(wanted, isOn)),
    );
    replaceChildren(this.summary, this.#summaryText(table, rows));
    this.#current = Math.max(0, opened === undefined ? 0 : rows.indexOf(opened));
    this.rows.element.setAttribute("aria-rowcount", rows.length + 2);
    this.rows.reset(rows.length);
    this.#keepInPlace(atTop, rows);
    this.#mark();
  }

  /** Returns the row at the top of a scrolled table, and its offset; null at the start of the table. */
  #rowAtTop() {
    const { scrollTop } = this.rows.element;
    const row = scrollTop > 0 ? selection.rows[Math.floor(scrollTop / ROW_HEIGHT)] : undefined;
    return row === undefined ? null : { row, offset: scrollTop % ROW_HEIGHT };
  }

  /** Scrolls so that rows which a running run adds above do not move the rows in sight. */
  #keepInPlace(atTop, rows) {
    const place = atTop ? rows.indexOf(atTop.row) : -1;
    if (place < 0) return;
    this.rows.element.scrollTop = place * ROW_HEIGHT + atTop.offset;
    this.rows.draw();
  }

  #summaryText(table, rows) {
    const searched =
      this.#search && `searched ${this.#search.numSearched} of ${this.#run.files.length} files`;
    if (!table.length) return this.#run.isComplete ? "No trajectories are stored." : "Loading…";
    return [
      summaryOf(table, rows),
      searched && h("span.muted", {}, ` · ${searched}`),
      !this.#run.isComplete && " · loading more…",
    ];
  }

  #drawHead(table, rows) {
    const wanted = this.#parameters.get("columns")?.split(",");
    const names = wanted ? wanted.filter((name) => table.has(name)) : defaultColumns(table);
    const isSame = names.join() === this.#columns.map(({ name }) => name).join();
    this.#columns = names.map(describe);
    this.rows.element.style.setProperty(
      "--columns",
      this.#columns.map(({ width }) => `${width}px`).join(" "),
    );
    this.rows.element.style.setProperty(
      "--width",
      `${this.#columns.reduce((sum, { width }) => sum + width, 0)}px`,
    );
    this.rows.element.setAttribute("aria-colcount", names.length);
    const { name: sorted, isDescending } = sortOf(this.#parameters);
    const focused = document.activeElement?.dataset?.sorts;
    replaceChildren(
      this.headRow,
      this.#columns.map((column) =>
        this.#headCell(column, table, rows, sorted === column.name ? isDescending : null),
      ),
    );
    if (focused) this.headRow.querySelector(`[data-sorts="${CSS.escape(focused)}"]`)?.focus();
    if (!isSame) {
      this.#template = rowTemplate(this.#columns, table);
      this.#inputs.clear();
      replaceChildren(
        this.filterRow,
        this.#columns.map((column) => this.#filterCell(column, table)),
      );
      this.#drawMenu(table);
    }
    this.#showFilters();
  }

  #headCell(column, table, rows, isDescending) {
    const sorts = isDescending === null ? "none" : isDescending ? "descending" : "ascending";
    const next = isDescending === true ? column.name : `-${column.name}`;
    return h(
      ".cell",
      { role: "columnheader", "aria-sort": sorts },
      h(
        "button.sort",
        { title: column.about || null, "data-sorts": column.name, onclick: () => adjust({ sort: next }) },
        column.label,
        isDescending !== null && h("span.arrow", { "aria-hidden": "true" }, isDescending ? "↓" : "↑"),
      ),
      columnHistogram(table, column, rows),
    );
  }

  #filterCell(column, table) {
    const isText = table.column(column.name).kind === "text";
    const list =
      isText && table.column(column.name).dictionary.length <= 40 ? suggestions(column, table) : null;
    const input = h("input", {
      type: "text",
      list: list?.id,
      spellcheck: "false",
      autocomplete: "off",
      "aria-label": `Filter ${column.label}`,
      placeholder: "filter",
      title: isText ? TEXT_FORMS : NUMBER_FORMS,
      oninput: debounced(() => adjust({ [`f.${column.name}`]: input.value }), 120),
    });
    this.#inputs.set(column.name, input);
    return h(".cell", { role: "gridcell" }, input, list);
  }

  #showFilters() {
    for (const [name, input] of this.#inputs) {
      const wanted = this.#parameters.get(`f.${name}`) ?? "";
      if (document.activeElement !== input && input.value !== wanted) input.value = wanted;
      input.classList.toggle("used", wanted !== "");
      const error = selection.errors.get(name);
      input.toggleAttribute("aria-invalid", Boolean(error));
      if (error) input.title = error;
    }
  }

  #rowOf(place) {
    const { table } = this.#run;
    const row = selection.rows[place];
    const element = this.#template.cloneNode(true);
    element.id = `row-${place}`;
    element.setAttribute("aria-rowindex", place + 3);
    fillRow(element, this.#columns, table, row);
    if (place === this.#current) element.classList.add("current");
    return element;
  }

  #applyQuick(wanted, isOn) {
    const names = Object.keys(wanted);
    if (!names.length) {
      for (const name of [...here().parameters.keys()])
        if (name.startsWith("f.") || name === "sort") adjust({ [name]: null });
      this.searchInput.value = "";
      this.#setSearch("");
      return;
    }
    adjust(Object.fromEntries(names.map((name) => [name, isOn ? null : wanted[name]])));
  }

  #drawMenu(table) {
    const names = new Set(this.#columns.map(({ name }) => name));
    const all = choices(table);
    const boxes = all.map((name) => {
      const box = h("input", { type: "checkbox", checked: names.has(name) });
      box.addEventListener("change", () => {
        if (box.checked) names.add(name);
        else names.delete(name);
        adjust({ columns: all.filter((one) => names.has(one)).join(",") });
      });
      return h("label", {}, box, describe(name).label);
    });
    const reset = h("button", { onclick: () => adjust({ columns: null }) }, "Default columns");
    replaceChildren(this.menu, h("summary", {}, "Columns"), h(".menu-body", {}, boxes, reset));
  }

  #searchInput() {
    return h("input.search", {
      type: "search",
      placeholder: "Search in all messages",
      "aria-label": "Search in all messages",
      value: this.#parameters.get("q") ?? "",
      oninput: debounced((event) => this.#setSearch(event.target.value), 250),
    });
  }

  #setSearch(text) {
    this.#search?.stop();
    this.#search = text.trim() ? new Search(text.trim(), this.#run) : null;
    adjust({ q: text });
    this.#continueSearch();
    this.#draw();
  }

  #continueSearch() {
    this.#search?.go(this.#redraw).catch((error) => (this.summary.textContent = error.message));
  }

  #keyBindings() {
    const move = (by) => () => {
      this.#current = Math.min(Math.max(0, this.#current + by), selection.rows.length - 1);
      this.rows.reveal(this.#current);
      this.#mark();
    };
    return [
      { keys: ["ArrowDown", "j"], about: "next row", action: move(1) },
      { keys: ["ArrowUp", "k"], about: "previous row", action: move(-1) },
      { keys: ["PageDown"], about: "20 rows down", action: move(PAGE_ROWS) },
      { keys: ["PageUp"], about: "20 rows up", action: move(-PAGE_ROWS) },
      { keys: ["Home"], about: "first row", action: move(-1e9) },
      { keys: ["End"], about: "last row", action: move(1e9) },
      { keys: ["Enter", "o"], about: "open the row", action: () => this.#open() },
      { keys: ["/"], about: "search", action: () => this.searchInput.focus() },
      {
        keys: ["f"],
        about: "filter the first column",
        action: () => this.filterRow.querySelector("input")?.focus(),
      },
      { keys: ["x"], about: "remove all filters", action: () => this.#applyQuick({}, false) },
    ];
  }

  #click(event) {
    const element = event.target.closest(".row");
    if (!element || event.target.closest("a") || getSelection().toString()) return;
    this.#current = Number(element.id.replace("row-", ""));
    go(linkTo(this.#run.table, selection.rows[this.#current]));
  }

  #open() {
    const focused = document.activeElement?.closest?.("button, a, summary");
    const row = selection.rows[this.#current];
    if (focused) focused.click();
    else if (row !== undefined) go(linkTo(this.#run.table, row));
  }

  #mark() {
    this.rows.element.querySelector(".row.current")?.classList.remove("current");
    this.rows.elementOf(this.#current)?.classList.add("current");
    const isThere = this.rows.elementOf(this.#current);
    if (isThere) this.rows.element.setAttribute("aria-activedescendant", `row-${this.#current}`);
    else this.rows.element.removeAttribute("aria-activedescendant");
  }
}

function suggestions(column, table) {
  const id = `values-${column.name}`;
  return h(
    "datalist",
    { id },
    table.column(column.name).dictionary.map((text) => h("option", { value: text })),
  );
}
