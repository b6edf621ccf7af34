"""The text column of a table, and rows of Arrow tables by strides."""

from collections.abc import Collection, Iterable, Iterator

import pyarrow as pa


def check_column(text_column: str, columns: Collection[str], where: str) -> None:
    """Raises ValueError, with the columns that are there, if `text_column` is not among them."""
    if text_column not in columns:
        raise ValueError(f"{where} has no column `{text_column}`; it has {sorted(columns)}. Set `--text_column`.")


def text_of(value: object, text_column: str, where: str) -> str:
    """A row's text; null is an empty document.

    Raises:
        ValueError: the value is neither text nor null, or its text cannot be written as UTF-8.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: column `{text_column}` holds {value!r:.80}, which is not a string. "
            "Mend the row, or set `--text_column`."
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair: "\ud83d"
        raise ValueError(f"{where}: column `{text_column}` holds half of a surrogate pair. Mend the row.") from error
    return value


def strided_texts(
    arrays: Iterable[pa.Array], start: int, step: int, *, text_column: str, where: str, first: int = 0
) -> Iterator[str]:
    """Rows `start, start + step, ...` of arrays in a row, the first of which begins with row `first`.

    Rows between are not decoded.

    Raises:
        ValueError: a row that is not text; the message says `where` and its number, counted from 0.
    """
    for array in arrays:
        numbers = range(start, first + len(array), step)
        for number in numbers:
            place = f"{where}, row {number}"
            try:
                value = array[number - first].as_py()
            except UnicodeDecodeError as error:
                raise ValueError(f"{place}: column `{text_column}` is not UTF-8 ({error}). Mend the row.") from error
            yield text_of(value, text_column, place)
        start += step * len(numbers)
        first += len(array)
