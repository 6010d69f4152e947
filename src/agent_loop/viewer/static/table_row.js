// Row elements of the table.

import { formatValue } from "./columns.js";
import { linkTo } from "./digest.js";
import { h } from "./dom.js";

const LETTERS_IN_SIGHT = 12;

/** Returns a row element without texts. Cloning it is faster than creating each row. */
export function rowTemplate(columns, table) {
  const kindOf = ({ name }) => (table.column(name).kind === "number" ? ".number" : "");
  return h(
    ".row",
    { role: "row" },
    columns.map((column) =>
      h(`.cell${kindOf(column)}`, { role: "gridcell" }, column.isLink && h("a", { tabindex: "-1" })),
    ),
  );
}

/** Writes the values of a table row into a clone of the template. */
export function fillRow(element, columns, table, row) {
  const tone = toneOf(table, row);
  if (tone) element.classList.add(tone);
  let cell = element.firstChild;
  for (const column of columns) {
    fillCell(cell, column, table, row);
    cell = cell.nextSibling;
  }
}

function fillCell(cell, column, table, row) {
  const value = table.value(column.name, row);
  const holder = column.isLink ? cell.firstChild : cell;
  holder.textContent = formatValue(value, column);
  if (column.isLink) holder.href = linkTo(table, row);
  if (value === null) cell.classList.add("none");
  else if (typeof value === "string" && value.length > LETTERS_IN_SIGHT) cell.title = value;
}

function toneOf(table, row) {
  if (table.value("failure", row) !== null) return "failed";
  const isSuccess = table.value("is_success", row);
  return isSuccess === null ? "" : isSuccess ? "good" : "bad";
}
