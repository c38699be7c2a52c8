"""Systems by name: the devices of a node and its links, which tables of runs on them leave out."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["System", "system_in", "system_named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system that is known by its name.

    Args:
        words: pattern of its name.
        device: of its nodes, as tables write it.
        per_node: devices of a node; a die of an MI250X counts as one.
        link_Gbps: gigabits per second of a device's share of its node's cards; 0: those of the device in the catalogue.
        is_word: whether its name is an ordinary word too.
    """

    words: str
    device: str
    per_node: int
    link_Gbps: float = 0
    is_word: bool = False


_SYSTEMS = (
    System(words=r"perlmutter", device="A100 40GB", per_node=4, link_Gbps=200),
    System(words=r"polaris", device="A100 40GB", per_node=4, link_Gbps=50, is_word=True),
    System(words=r"theta ?gpu", device="A100 40GB", per_node=8, link_Gbps=200),
    System(words=r"juwels(?: booster)?", device="A100 40GB", per_node=4, link_Gbps=200),
    System(words=r"(?:meluxina|vega|horeka|mahti)", device="A100 40GB", per_node=4, link_Gbps=100, is_word=True),
    System(words=r"karolina", device="A100 40GB", per_node=8, link_Gbps=100),
    System(words=r"leonardo(?: booster)?", device="A100 64GB", per_node=4, link_Gbps=100, is_word=True),
    System(words=r"selene", device="A100 80GB", per_node=8),
    System(words=r"(?:cambridge ?1|berzelius)", device="A100 40GB", per_node=8),
    System(words=r"summit", device="V100 16GB", per_node=6, link_Gbps=100 / 3, is_word=True),
    System(words=r"(?:sierra|lassen|longhorn)", device="V100 16GB", per_node=4, link_Gbps=50, is_word=True),
    System(words=r"puhti", device="V100 32GB", per_node=4, link_Gbps=50),
    System(words=r"eos", device="H100 80GB", per_node=8, is_word=True),
    System(words=r"(?:mare ?nostrum|mn) ?5(?: acc\w*)?", device="H100 64GB", per_node=4, link_Gbps=200),
    System(words=r"tsubame ?4(?: 0)?", device="H100 94GB SXM", per_node=4, link_Gbps=200),
    System(words=r"abci ?3(?: 0)?", device="H200", per_node=8, link_Gbps=200),
    System(words=r"(?:alps|isambard ?ai|venado|delta ?ai|helios)", device="GH200", per_node=4, link_Gbps=200,
           is_word=True),
    System(words=r"jupiter(?: booster)?|jedi", device="GH200", per_node=4, link_Gbps=200, is_word=True),
    System(words=r"(?:frontier|lumi(?: g)?|setonix|crusher|adastra|dardel)", device="MI250X GCD", per_node=8,
           link_Gbps=100, is_word=True),
    System(words=r"(?:el capitan|tuolumne|hunter)", device="MI300A", per_node=4, link_Gbps=200, is_word=True),
    System(words=r"piz daint", device="P100 PCIe 16GB", per_node=1, link_Gbps=80),
)  # fmt: skip
"""JUPITER by its configuration page (apps.fz-juelich.de/jsc/hps/jupiter) and Alps by docs.cscs.ch, both with a card of
200 Gb/s for each GH200; the others by their operators' pages, from memory. Devices with a memory that the catalogue
lacks, Leonardo's A100 of 64 GB and MareNostrum's H100 of 64 GB, are taken as its nearest."""


def system_named(text: str) -> System | None:
    """The system that a cell names at its start; None if there is none.

    >>> system_named("Perlmutter (NERSC)").per_node, system_named("2 x A100")
    (4, None)
    """
    plain = re.sub(r"^\d+ ?x? nodes? (?:of )?", "", _plain(text))
    return next((each for each in _SYSTEMS if re.match(rf"(?:{each.words})\b", plain)), None)


def system_in(sentence: str) -> System | None:
    """The system that a sentence names; None if it names none or several.

    A name that is an ordinary word too counts if it is written with a capital letter, behind "on", "at" or "of" or in
    front of "system" or the like.

    >>> system_in("Weak scaling on JUWELS Booster").per_node, system_in("training of a frontier model")
    (4, None)
    """
    found = [each for each in _SYSTEMS if _says(sentence, each)]
    return found[0] if len(found) == 1 else None


def _says(sentence: str, system: System) -> bool:
    words = re.sub(r" (\??)", r"[- ]\1", system.words)
    for match in re.finditer(rf"(?<![\w-])(?:{words})(?![\w-])", sentence, re.I):
        before, after = sentence[: match.start()], sentence[match.end() :]
        if not match.group()[0].isupper():
            continue
        if not system.is_word or _BEFORE.search(before) or _BEHIND.match(after):
            return True
    return False


_BEFORE = re.compile(r"(?:\b(?:on|at|of|using|cluster|(?:super)?computer|system)|[:,(])(?: the)?(?: \w+'s)? *$", re.I)
_BEHIND = re.compile(r" *(?:\(|(?:super)?computer|system|cluster|nodes?\b|booster)", re.I)
"""Words around the names of systems."""


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
