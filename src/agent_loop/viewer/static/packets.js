// Decoder of the server's binary packets; see packets.py.

const ARRAYS = { f4: Float32Array, f8: Float64Array, i4: Int32Array, u1: Uint8Array };

/** Returns `{meta, columns}`. A column is `{values, dictionary}`; the dictionary is set if values are string codes. */
export function decodePacket(buffer) {
  const headLength = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, headLength)));
  const columns = new Map();
  for (const { name, kind, offset, length, dictionary } of head.columns) {
    const values = new ARRAYS[kind](buffer, 4 + headLength + offset, length);
    columns.set(name, { values, dictionary: dictionary ?? null });
  }
  return { meta: head.meta, columns };
}
