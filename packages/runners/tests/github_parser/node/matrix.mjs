// The combinations of `strategy.matrix`.

import { JobError } from "./expressions.mjs";

/**
 * Expands a matrix into its combinations: the entries of `include`, or the values of one key.
 *
 * matrix: the evaluated value of the file.
 * Throws: JobError if there is no combination, because GitHub fails such a job, and for other forms, which none
 *     of our workflows has.
 */
export function expandMatrix(matrix) {
  const [[key, values] = [], ...others] = Object.entries(matrix ?? {});
  if (others.length > 0 || key === "exclude") {
    throw new JobError(`a matrix of ${Object.keys(matrix).join(", ")} is not evaluated`);
  }
  if (key !== undefined && !Array.isArray(values)) {
    throw new JobError(`${key} of the matrix is ${JSON.stringify(values)}, and a list is expected`);
  }
  if (key === undefined || values.length === 0) {
    throw new JobError("empty matrix: there is no combination");
  }
  return values.map((value) => (key === "include" ? value : { [key]: value }));
}
