// The combinations of `strategy.matrix`.

import { isDeepStrictEqual } from "node:util";

import { JobError } from "./expressions.mjs";

/**
 * Expands a matrix into its combinations, in GitHub's order.
 *
 * matrix: the evaluated value of the file.
 * Throws: JobError if there is no combination, because GitHub fails such a job.
 */
export function expandMatrix(matrix) {
  const { include = [], exclude = [], ...vectors } = asMapping(matrix, "the matrix");
  for (const [key, values] of Object.entries(vectors)) {
    if (asList(values, `${key} of the matrix`).length === 0) {
      throw new JobError(`empty matrix: ${key} has no values`);
    }
  }
  const products = multiply(vectors).filter(
    (product) => !asEntries(exclude, "exclude").some((entry) => isPartOf(entry, product)),
  );
  const combinations = products.map((product) => ({ ...product }));
  for (const entry of asEntries(include, "include")) {
    const shared = Object.fromEntries(Object.entries(entry).filter(([key]) => key in vectors));
    // An entry extends combinations of the vectors without overwriting their values.
    const extended = products.flatMap((product, i) => (isPartOf(shared, product) ? [i] : []));
    extended.forEach((i) => Object.assign(combinations[i], entry));
    if (extended.length === 0) {
      combinations.push({ ...entry });
    }
  }
  if (combinations.length === 0) {
    throw new JobError("empty matrix: there is no combination");
  }
  return combinations;
}

function multiply(vectors) {
  const entries = Object.entries(vectors);
  return entries.length === 0
    ? []
    : entries.reduce(
        (products, [key, values]) =>
          products.flatMap((product) => values.map((value) => ({ ...product, [key]: value }))),
        [{}],
      );
}

function isPartOf(entry, product) {
  return Object.entries(entry).every(([key, value]) => isDeepStrictEqual(product[key], value));
}

function asEntries(value, what) {
  return asList(value, `${what} of the matrix`).map((entry) =>
    asMapping(entry, `an entry of ${what}`),
  );
}

function asList(value, what) {
  if (!Array.isArray(value)) {
    throw new JobError(`${what} is ${JSON.stringify(value)}, and a list is expected`);
  }
  return value;
}

function asMapping(value, what) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) {
    throw new JobError(`${what} is ${JSON.stringify(value)}, and a mapping is expected`);
  }
  return value;
}
