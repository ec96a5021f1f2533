"""What `mugrpo doctor --fix` does beside a torch for CPU; what pip would do is a stand-in's."""

from __future__ import annotations

from pathlib import Path

import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.doctor import fix as fixes

TORCHVISION = """
import torch

@torch.library.register_fake("torchvision::nms")
def meta_nms(dets, scores): ...


def meta(): ...
@torch.library.register_fake("torchvision::roi_align")
def meta_roi(x): ...
"""


class Environment:
    """An environment with these packages, of which `works` can be imported; records what is installed and removed."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, packages: dict[str, str], device: bool = False) -> None:
        self.packages, self.installed, self.said = packages, list[str](), list[str]()
        self.file = folder / fixes.FAKES
        self.file.write_text(TORCHVISION)
        patch.setattr(fixes, "_installed", self.packages.get)
        patch.setattr(fixes, "_folder", lambda name: folder)
        patch.setattr(fixes, "_torch_finds_a_device", lambda: device)
        patch.setattr(fixes, "_pip_install", self.install)
        patch.setattr(fixes, "_imports", lambda name: "register_fake" not in self.file.read_text())

    def install(self, requirements: list[str]) -> None:
        self.installed += requirements
        self.packages.update(dict(requirement.split("==") for requirement in requirements))

    def fix(self) -> None:
        fixes.fix(self.said.append)


@pytest.mark.parametrize("megatron", list(fixes.STACKS))
def test_it_installs_the_stacks_versions_once(megatron: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment(monkeypatch, tmp_path, {"megatron-core": megatron})
    environment.fix()
    stack = fixes.STACKS[megatron]
    assert environment.installed == [f"sglang=={stack.sglang}", f"torchvision=={stack.torchvision}"]
    assert environment.file.read_text() == TORCHVISION.replace(
        '@torch.library.register_fake("torchvision::nms")\n', ""
    ).replace('@torch.library.register_fake("torchvision::roi_align")\n', "")
    assert "removed 2 registrations" in environment.said[-1]
    environment.said.clear()
    environment.fix()
    assert len(environment.installed) == 2
    assert environment.said == []


def test_a_gpu_and_a_foreign_megatron_are_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r'sglang==0.5.15.post1 .*pip install "mugrpo-megatron\[cuda\]"'):
        Environment(monkeypatch, tmp_path, {"megatron-core": "0.16.1"}, device=True).fix()
    with pytest.raises(UserError, match=r'megatron-core is not installed, .*"mugrpo-megatron\[cpu\]"'):
        Environment(monkeypatch, tmp_path, {}).fix()
    with pytest.raises(
        UserError, match=r"megatron-core 9 is installed, and SGLang was tested with 0\.16\.1 and 0\.19\.2 only"
    ):
        Environment(monkeypatch, tmp_path, {"megatron-core": "9"}).fix()


def test_a_torchvision_that_stays_broken_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment(monkeypatch, tmp_path, {"megatron-core": "0.16.1", "sglang": "1", "torchvision": "2"})
    monkeypatch.setattr(fixes, "_imports", lambda name: False)
    with pytest.raises(UserError, match="torchvision 2 still cannot be imported"):
        environment.fix()
    assert environment.installed == []
