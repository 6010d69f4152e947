// Wraps tokens into lines of a given width, so that only the visible lines need elements.

const WIDE =
  /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6]|[\u{1f300}-\u{1faff}]|[\u{20000}-\u{3ffff}]/u;
const PLAIN = /^[\x20-\x7e]*$/;
const MARKS = { "\n": "⏎", "\r": "␍", "\t": "→   " };
const CONTROL = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

/**
 * Returns lines: `{block}` for a heading, or `{tokens, texts}` with the tokens on the line and their visible texts.
 *
 * @param columns  Number of characters that fit on a line.
 */
export function tokenLines(trajectory, columns, hidden = new Set()) {
  const lines = [];
  trajectory.blocks.forEach((block, index) => {
    lines.push({ block });
    if (!hidden.has(index)) cut(trajectory, block, columns, lines);
  });
  return lines;
}

function cut(trajectory, { start, end }, columns, lines) {
  const shown = trajectory.pieces.shown(trajectory.ids.subarray(start, end));
  let line = { tokens: [], texts: [] };
  let used = 0;
  const finish = () => {
    if (line.tokens.length) lines.push(line);
    line = { tokens: [], texts: [] };
    used = 0;
  };
  const put = (token, text, width) => {
    line.tokens.push(token);
    line.texts.push(text);
    used += width;
  };
  for (let place = 0; place < shown.length; place++) {
    const token = start + place;
    const text = shown[place];
    if (PLAIN.test(text)) {
      if (used + text.length > columns) finish();
      if (text.length <= columns) put(token, text, text.length);
      else cutLong(token, text, { columns, put, finish });
      continue;
    }
    for (const part of text.split(/(?<=\n)/)) {
      const marked = visible(part);
      const width = widthOf(marked);
      if (used + width > columns) finish();
      if (width <= columns) put(token, marked, width);
      else cutLong(token, marked, { columns, put, finish });
      if (part.endsWith("\n")) finish();
    }
  }
  finish();
}

function cutLong(token, text, { columns, put, finish }) {
  let part = "";
  let width = 0;
  for (const letter of text) {
    const size = widthOf(letter);
    if (width + size > columns) {
      put(token, part, width);
      finish();
      [part, width] = ["", 0];
    }
    part += letter;
    width += size;
  }
  if (part) put(token, part, width);
}

/** Replaces invisible characters by visible symbols. */
export function visible(text) {
  return text.replace(
    CONTROL,
    (letter) => MARKS[letter] ?? `‹${letter.codePointAt(0).toString(16).toUpperCase()}›`,
  );
}

function widthOf(text) {
  if (PLAIN.test(text)) return text.length;
  let width = 0;
  for (const letter of text) width += WIDE.test(letter) ? 2 : 1;
  return width;
}

/** Returns the line on which a token begins. */
export function lineOfToken(lines, token) {
  let [low, high] = [0, lines.length - 1];
  let best = 0;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (firstToken(lines[middle]) <= token) [best, low] = [middle, middle + 1];
    else high = middle - 1;
  }
  while (best + 1 < lines.length && lines[best].block && firstToken(lines[best + 1]) <= token) best++;
  while (best > 0 && !lines[best].block && lines[best - 1].tokens?.includes(token)) best--;
  return best;
}

const firstToken = (line) => (line.block ? line.block.start : line.tokens[0]);
