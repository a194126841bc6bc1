"""A run that has no state of its own begins with what another run, or another tool, has saved.

The run's configuration names one commit of another run; each rank reads it for itself before the
first step, every byte checked, and `taking_over` loads what fits. Nothing here takes part in a
recovery: a run that holds a step of its own never comes back here. A step that an import has put
into the run itself is loaded by the same rules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from relit_platform.run_config import InitConfig
from relit_platform.worker.state_tree import DTYPES, StateHolder, dtype_name
from relit_platform.worker.taking_over import Report, Rule, Saved, take_over
from relit_storage.checkpoint.copies import StepCopy
from relit_storage.checkpoint.copy_reading import CopyReader
from relit_storage.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest
from relit_storage.errors import (
    CorruptShardError,
    ManifestError,
    ObjectMissingError,
    StoreError,
    StoreUnavailableError,
)
from relit_storage.run.layout import manifest_key
from relit_storage.stores.opening import open_store
from relit_storage.stores.protocol import ObjectStore

IMPORTED = "imported"  # in the extras of a step that no rank has saved; see relit.importing


def load_initial(config: InitConfig, objects: Mapping[str, StateHolder]) -> Report:
    """Take over the step that a run's configuration names; blocks for the reads.

    InitialStateError if it is not there any more, damaged, or does not fit what is registered: no
    other step will do. StoreUnavailableError says nothing about it: try again.
    """
    rule = Rule(
        run=config.run_id,
        step=config.step,
        weights_only=config.weights_only,
        strict=config.strict,
        rename=config.rename,
    )
    try:
        reader = CopyReader(_committed(open_store(config.source), config, rule))
        return take_over(objects, _saved(reader), rule)
    except (CorruptShardError, ManifestError) as error:
        raise rule.error(f"{error.fields['file']} {error.fields['reason']}") from error
    except StoreUnavailableError:
        raise
    except StoreError as error:
        raise rule.error(str(error)) from error


def load_import(
    run_id: str,
    objects: Mapping[str, StateHolder],
    tensors: Mapping[str, Tensor],
    extras: Mapping[str, Any],
) -> Report:
    """Take over the run's own step, which an import has made, as a restore has read it.

    What is registered and not in it stays as the code made it. InitialStateError.
    """
    step = int(extras["step"])
    rule = Rule(run=run_id, step=step, weights_only=False, objects_may_lack=True)
    specs = {name: (dtype_name(t), tuple(t.shape)) for name, t in tensors.items()}
    return take_over(objects, Saved(extras["objects"], specs, lambda name: tensors[name]), rule)


def _committed(store: ObjectStore, config: InitConfig, rule: Rule) -> StepCopy:
    key = manifest_key(config.step, config.generation)
    try:
        raw = store.get_range(key, 0, MAX_MANIFEST_BYTES)
    except ObjectMissingError as error:
        raise rule.error(f"it was deleted from {store.url} since the run was submitted") from error
    if hashlib.sha256(raw).hexdigest() != config.manifest_sha256:
        raise rule.error(f"{key} in {store.url} is not what it was when the run was submitted")
    return StepCopy(
        tier="object",
        step=config.step,
        generation=config.generation,
        stores=(store,),
        manifest=Manifest.from_bytes(raw, key),
    )


def _saved(reader: CopyReader) -> Saved:
    objects = reader.extras(0).get("objects")
    if not isinstance(objects, dict):
        file = reader.manifest.shard(0).extras_file
        raise CorruptShardError(file=file, reason="the structure of the state is not in it")
    entries = {tensor.name: tensor for tensor in reader.manifest.tensors}

    def read(name: str) -> Tensor:
        entry = entries[name]
        raw, dtype = reader.read(entry), DTYPES[entry.dtype]
        if not raw:
            return torch.empty(entry.global_shape, dtype=dtype)
        return torch.frombuffer(raw, dtype=dtype).view(entry.global_shape)

    return Saved(objects, {n: (e.dtype, e.global_shape) for n, e in entries.items()}, read)
