"""Hypothesis strategies for drafts, their configurations and checkpoints, for layers and stacks of them, and for a fused kernel's inputs.

They are for two readers: a team that tests its draft, and the people who write the engines and want to know of *their* stacked path what
this library knows of its own: that it serves every stack that can be served and refuses every one that cannot.

All share a few habits. Arguments are keyword-only, each a value or a strategy of it, and are checked when the strategy is made. What is
drawn is a small frozen record that prints as the call that makes it again; its tensors are filled from a drawn seed and a drawn *kind*
(zeros, small integers, …) when they are first asked for. So drawing costs next to nothing, needs no torch, and an example that is copied
out of a failure is the same example.
"""

from __future__ import annotations

from pytest_specdecode.strategies.checkpoints import DraftFiles, checkpoints
from pytest_specdecode.strategies.configs import LayerConfig, layer_configs
from pytest_specdecode.strategies.drafts import FAMILY_NAMES, PACKAGINGS, draft_configs, draft_specs
from pytest_specdecode.strategies.heterogeneous import BrokenStack, heterogeneous_stacks
from pytest_specdecode.strategies.kernels import LAYOUTS, POSITION_KINDS, KernelInput, kernel_inputs
from pytest_specdecode.strategies.latent_config import LatentConfig, latent_configs
from pytest_specdecode.strategies.latent_heterogeneous import BrokenLatentStack, heterogeneous_latent_stacks
from pytest_specdecode.strategies.latent_kernel import LatentInput, latent_kernel_inputs
from pytest_specdecode.strategies.latent_stack import LatentStack, homogeneous_latent_stacks
from pytest_specdecode.strategies.mla import MLAConfig, MLALayer, mla_configs, mla_layers
from pytest_specdecode.strategies.mutated import FAULTY_CHECKS, MutatedConfig, mutated_configs
from pytest_specdecode.strategies.stacks import Stack, homogeneous_stacks
from pytest_specdecode.strategies.tensors import KINDS

__all__ = [
    "FAMILY_NAMES",
    "FAULTY_CHECKS",
    "KINDS",
    "LAYOUTS",
    "PACKAGINGS",
    "POSITION_KINDS",
    "BrokenLatentStack",
    "BrokenStack",
    "DraftFiles",
    "KernelInput",
    "LatentConfig",
    "LatentInput",
    "LatentStack",
    "LayerConfig",
    "MLAConfig",
    "MLALayer",
    "MutatedConfig",
    "Stack",
    "checkpoints",
    "draft_configs",
    "draft_specs",
    "heterogeneous_latent_stacks",
    "heterogeneous_stacks",
    "homogeneous_latent_stacks",
    "homogeneous_stacks",
    "kernel_inputs",
    "latent_configs",
    "latent_kernel_inputs",
    "layer_configs",
    "mla_configs",
    "mla_layers",
    "mutated_configs",
]
