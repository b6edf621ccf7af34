"""Calls of the Hub, tried again where that can help; what goes wrong otherwise is said in one paragraph.

The choices:
- Too many requests (429), a server's error (5xx) and a broken connection pass: they are waited for, as long as the Hub
  asks (`Retry-After`) or a little longer each time. A refusal (401, 403, ...) does not pass, and is said at once.
- huggingface_hub itself tries an upload's own requests again, for about 20 s; what is here goes around that, and around
  the requests that it makes once (who am I, create, the commit).
- No message holds the token, whatever the server may echo.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from huggingface_hub.errors import HfHubHTTPError

logger = logging.getLogger(__name__)

WAITS = (5, 15, 45, 135)
"""Seconds before each new try of a push, unless the Hub asks for more."""
LONGEST_WAIT = 600
"""Seconds that the Hub may ask to wait; for more, the call ends and says when to come back."""

LOG_IN = "Log in with `hf auth login`, or set `HF_TOKEN`, with a token that may write (on the Hub: Settings, Tokens)."

# What the HTTP library of the installed huggingface_hub (httpx, httpx2) raises where there is no answer.
_HTTPError = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
_PASSING = (408, 429, 500, 502, 503, 504)

Answer = TypeVar("Answer")


def patiently(call: Callable[[], Answer], doing: str, *, token: str, waits: Sequence[float] = WAITS) -> Answer:
    """What `call` returns, after as many more tries as there are `waits`.

    Args:
        doing: begins the messages, such as "The push to `me/tlm`".

    Raises:
        ValueError: the Hub refuses.
        ConnectionError: it cannot be reached, or fails again and again.
    """
    left = iter(waits)
    while True:
        try:
            return call()
        except Exception as error:  # an upload's errors come wrapped in a RuntimeError
            cause = next((each for each in _chain(error) if isinstance(each, _HTTPError)), None)
            if cause is None:
                raise
            seconds = _seconds_to_wait(cause, next(left, None))
            if seconds is None:
                raise _in_words(cause, doing, token) from error
            logger.warning("%s: %s. Trying again in %d s.", doing, _what_happened(cause, token), seconds)
            time.sleep(seconds)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def status_of(error: Exception) -> int | None:
    """The HTTP status that an error of huggingface_hub stands for; None where there was no answer."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _asked_to_wait(error: Exception) -> int:
    """Seconds of a `Retry-After` header, 0 without one."""
    value = error.response.headers.get("Retry-After", "") if isinstance(error, HfHubHTTPError) else ""
    return int(value) if value.isdigit() else 0


def _seconds_to_wait(error: Exception, planned: float | None) -> float | None:
    """None where a new try is of no use, or was the last."""
    asked = _asked_to_wait(error)
    if planned is None or status_of(error) not in (None, *_PASSING) or asked > LONGEST_WAIT:
        return None
    return max(planned, asked)


def _what_happened(error: Exception, token: str) -> str:
    status = status_of(error)
    said = f"no answer ({error})" if status is None else f"the Hub answers {status}"
    message = getattr(error, "server_message", None)
    return f"{said} ({message})".replace(token, "***") if message else said.replace(token, "***")


def _in_words(error: Exception, doing: str, token: str) -> ValueError | ConnectionError:
    status, happened = status_of(error), _what_happened(error, token)
    if status == 401:
        return ValueError(f"{doing} needs a token that the Hub accepts; this one is invalid or expired. {LOG_IN}")
    if status == 403:
        return ValueError(f"{doing} is not allowed to this token: {happened}. {LOG_IN}")
    if status in (409, 412):
        return ValueError(f"{doing} met another change to the repository: {happened}. Look at it, then try again.")
    if status == 429:
        seconds = _asked_to_wait(error)
        when = f"in {seconds} s" if seconds else "later"
        return ConnectionError(f"{doing} is one request too many for the Hub: {happened}. Try again {when}.")
    if status is None:
        return ConnectionError(f"{doing} failed: {happened}. Look at the network and at `HF_ENDPOINT`, then try again.")
    passing = " It may pass: try again later." if status in _PASSING else ""
    return (ConnectionError if passing else ValueError)(f"{doing} failed: {happened}.{passing}")
