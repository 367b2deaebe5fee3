// Restores NaN and infinity, which JSON cannot represent: they are null, and the field "nonfinite" lists their paths.

const NUMBERS = { nan: NaN, inf: Infinity, "-inf": -Infinity };

/** Returns the object with NaN and infinities restored in place. */
export function restoreNonFinite(object) {
  const { nonfinite: marks, ...rest } = object;
  for (const [path, word] of Object.entries(marks ?? {})) {
    const names = path.split("/").map((name) => name.replaceAll("~1", "/").replaceAll("~0", "~"));
    const last = names.pop();
    const place = names.reduce(
      (inner, name) => (inner !== null && typeof inner === "object" && Object.hasOwn(inner, name) ? inner[name] : null),
      rest,
    );
    if (place !== null && Object.hasOwn(place, last) && place[last] === null && Object.hasOwn(NUMBERS, word))
      place[last] = NUMBERS[word];
  }
  return rest;
}
