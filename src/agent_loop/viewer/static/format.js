// Formatting of numbers, times and texts.

const NONE = "–";

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Formats a number with at most four significant digits. */
export function number(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (Number.isInteger(value)) return size < 1e7 ? value.toLocaleString("en") : compact(value);
  if (size >= 1e6) return compact(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size >= 0.001) return trimmed(value.toPrecision(size >= 1 ? 4 : 3));
  return value.toExponential(1);
}

export function compact(value) {
  if (!isNumber(value)) return NONE;
  return new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(value);
}

export function share(value) {
  return isNumber(value) ? `${trimmed((100 * value).toFixed(1))} %` : NONE;
}

export function seconds(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (size < 1) return `${trimmed((value * 1000).toPrecision(3))} ms`;
  if (size < 120) return `${trimmed(value.toPrecision(3))} s`;
  if (size < 7200) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

export function signed(value) {
  return isNumber(value) && value > 0 ? `+${number(value)}` : number(value);
}

export function plural(count, one, many = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : many}`;
}

/** Returns a label for a name, such as "reward / mean" for `reward/mean`. */
export function labelOf(name) {
  return name.replaceAll("_", " ").replaceAll("/", " / ");
}

export function clipped(text, length) {
  return text.length > length ? `${text.slice(0, length)}…` : text;
}

/** Returns the text of a message, whose content may be a string, null or a list of parts. */
export function contentText(content) {
  if (content == null) return "";
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return JSON.stringify(content, null, 2);
  return content
    .map((part) => (typeof part === "string" ? part : (part?.text ?? described(part))))
    .join("\n");
}

function described(part) {
  return `[${part?.type ?? "part"}] ${clipped(JSON.stringify(part), 300)}`;
}

function trimmed(text) {
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
}
