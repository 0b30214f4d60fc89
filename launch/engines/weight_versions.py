"""Versions of the weights that sampled the tokens of a response, as servers name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_rc.launch.engines import EngineError

UNNAMED = "default"  # version of a server that got none since its start
_MOST_DIGITS = 10


class RestartedError(EngineError):
    """A server was restarted and has lost its weights."""


@dataclass(frozen=True)
class VersionRange:
    """Versions that a server can hold; a version is the number of optimizer steps that made the weights."""

    oldest: int  # version that it held when it was asked
    newest: int  # largest version that it was given

    def read(self, answer: Any, where: str) -> int:
        """The version that a server names; ``where`` names the server in errors.

        Raises:
            RestartedError: the server has no version any more.
            EngineError: the version is no number, or not one that the server was given.
        """
        if answer == UNNAMED:
            raise RestartedError(f"{where} lost the weights of step {self.newest}, probably in a restart")
        is_number = isinstance(answer, str) and answer.isascii() and answer.isdecimal() and len(answer) <= _MOST_DIGITS
        if not is_number:
            raise EngineError(
                f"{where} names its weights {repr(answer)[:80]}, expected a number in quotes: does another program "
                "update them?"
            )
        version = int(answer)
        if not self.oldest <= version <= self.newest:
            expected = f"{self.oldest} to {self.newest}" if self.oldest < self.newest else str(self.newest)
            raise EngineError(
                f"{where} holds weights {version}, expected {expected}: does another program update them?"
            )
        return version

    def read_spans(self, spans: Any, tokens: int, where: str) -> list[int]:
        """Version of each of a response's ``tokens`` tokens, from vLLM's ``weight_versions``.

        ``spans`` is a list of objects: ``version`` sampled the tokens from ``start`` to ``end``, without ``end``.

        Raises:
            RestartedError: a span has no version.
            EngineError: the spans do not cover each token once, in their order, or a version is wrong, see
                :meth:`read`; or a version follows a newer one.
        """
        versions: list[int] = []
        for span in spans if isinstance(spans, list) else [spans]:
            fields = span if isinstance(span, dict) else {}
            start = fields.get("start")
            end = fields.get("end")
            if type(start) is not int or type(end) is not int or not len(versions) == start <= end <= tokens:
                raise EngineError(
                    f"{where} weight_versions has {repr(span)[:80]}, expected version, start {len(versions)} and an "
                    f"end of at most {tokens}: the answer cannot be used"
                )
            version = self.read(fields.get("version"), where)
            if versions and version < versions[-1]:
                raise EngineError(f"{where} weights {version} sampled after weights {versions[-1]}: see its log")
            versions += [version] * (end - start)
        if len(versions) != tokens:
            raise EngineError(f"{where} weight_versions covers {len(versions)} of {tokens} tokens: see its log")
        return versions
