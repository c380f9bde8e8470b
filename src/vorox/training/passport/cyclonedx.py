"""Write the bill of materials of a checkpoint as CycloneDX 1.6 (ML-BOM).

In: a passport and the files that it travels with. Out: JSON. The package ``cyclonedx-python-lib`` builds it; it has no
model cards and no ``data`` of components yet (https://cyclonedx.org/docs/1.6/json/), so these are added to its JSON.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from vorox.core.files.atomic import pretty_json
from vorox.training.passport.description import Files, Parent, Passport, library, package_url

_MODEL, _SOURCE = "model", "source-{}"
"""``bom-ref`` of the model and of a source by its number."""


def cyclonedx(passport: Passport, files: Files) -> bytes:
    """Return the bill of materials."""
    component, model = library("cyclonedx.model.component"), library("cyclonedx.model")
    kinds, bom_module = component.ComponentType, library("cyclonedx.model.bom")
    sources = passport.record["sources"]
    ancestors = [_parent(index, one) for index, one in enumerate(passport.parents)]
    subject = component.Component(
        type=kinds.MACHINE_LEARNING_MODEL,
        name=passport.name,
        version=f"step-{passport.step}",
        bom_ref=_MODEL,
        supplier=_organization(passport.record["general"]["provider"]),
        components=[
            component.Component(
                type=kinds.FILE, name=name, bom_ref=f"file-{index}",
                hashes=[model.HashType(alg=model.HashAlgorithm.SHA_256, content=sha256)],
                properties=_properties({"size_bytes": size_bytes}),
            )
            for index, (name, (size_bytes, sha256)) in enumerate(files.items())
        ],
        pedigree=component.Pedigree(ancestors=ancestors) if ancestors else None,
        properties=_properties(_facts_of_model(passport)),
    )  # fmt: skip
    data = [_source(index, source) for index, source in enumerate(sources)]
    libraries = [_library(name, version) for name, version in passport.software.items()]
    bom = bom_module.Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"urn:vorox:passport:{passport.digest}"),
        metadata=bom_module.BomMetaData(timestamp=passport.time, component=subject),
        components=[*data, *libraries],
    )
    bom.register_dependency(subject, [*data, *libraries])
    output, schema = library("cyclonedx.output.json"), library("cyclonedx.schema")
    written = json.loads(output.BY_SCHEMA_VERSION[schema.SchemaVersion.V1_6](bom).output_as_string())
    written["metadata"]["component"]["modelCard"] = _model_card(passport)
    for one in written["components"]:
        if one["type"] == "data":
            one["data"] = [{"type": "dataset", "name": one["name"]}]
    return pretty_json(written)


def _properties(values: Mapping[str, object]) -> list[Any]:
    """Return what is known of some values as properties of the namespace ``vorox``."""
    make = library("cyclonedx.model").Property
    return [make(name=f"vorox:{name}", value=str(value)) for name, value in values.items() if value is not None]


def _facts_of_model(passport: Passport) -> dict[str, object]:
    general, proof = passport.record["general"], passport.record["proof"]
    return {
        "run": passport.run_id,
        "step": passport.step,
        "weights": passport.weights,
        "fingerprint": passport.fingerprint,
        "parameters": passport.num_parameters,
        "adapter": passport.adapter,
        "tokenizer": passport.tokenizer,
        "commit": passport.commit,
        "commit:has_local_changes": passport.has_local_changes if passport.commit else None,
        **{f"training:{key}": general[key] for key in ("tokens", "distinct_tokens", "documents")},
        **{f"training:steps:{key}": count for key, count in passport.record["steps"].items()},
        **{f"proof:{key}": value for key, value in proof.items()},
        **{f"signed_by:{index}": key for index, key in enumerate(passport.signed_by)},
        **{f"recipe:{key}": value for key, value in passport.recipe.items()},
    }


def _source(index: int, source: Mapping[str, Any]) -> Any:
    component = library("cyclonedx.model.component")
    licence = source["licence"]
    counted = (
        "tokens", "distinct_tokens", "documents", "rows", "epochs", "share", "num_source_files", "quarantined_records",
        "files_sha256", "recipe_sha256", "content_sha256", "kind", "acquired",
    )  # fmt: skip
    return component.Component(
        type=component.ComponentType.DATA,
        name=source["name"],
        bom_ref=_SOURCE.format(index),
        description=source["description"],
        licenses=[_licence(licence)] if licence else [],
        properties=_properties({key: source[key] for key in counted} | {"files_read": len(source["files"])}),
    )


def _licence(text: str) -> Any:
    return library("cyclonedx.contrib.license.factories").LicenseFactory().make_from_string(text)


def _parent(index: int, parent: Parent) -> Any:
    component = library("cyclonedx.model.component")
    checkpoints = {
        f"checkpoint:{number}": f"{one.run or 'unknown run'} step {one.step} {one.fingerprint}".strip()
        for number, one in enumerate(parent.checkpoints)
    }
    return component.Component(
        type=component.ComponentType.MACHINE_LEARNING_MODEL,
        name=parent.location,
        bom_ref=f"parent-{index}",
        properties=_properties({"fingerprint": parent.fingerprint or None, **checkpoints}),
    )


def _library(name: str, version: str) -> Any:
    component, url = library("cyclonedx.model.component"), package_url(name, version)
    return component.Component(
        type=component.ComponentType.LIBRARY,
        name=name,
        version=version,
        bom_ref=f"library-{name}",
        purl=None if url is None else library("packageurl").PackageURL.from_string(url),
    )


def _organization(provider: str | None) -> Any:
    return library("cyclonedx.model.contact").OrganizationalEntity(name=provider) if provider else None


def _model_card(passport: Passport) -> dict[str, Any]:
    datasets = [{"ref": _SOURCE.format(index)} for index in range(len(passport.record["sources"]))]
    parameters: dict[str, Any] = {"task": "text-generation", "datasets": datasets}
    if passport.model_type:
        parameters["modelArchitecture"] = passport.model_type
    card: dict[str, Any] = {"modelParameters": parameters}
    if passport.metrics:
        card["quantitativeAnalysis"] = {"performanceMetrics": list(_performance(passport))}
    return card


def _performance(passport: Passport) -> Iterable[dict[str, str]]:
    for metric in passport.metrics:
        yield {"type": metric.name, "value": repr(metric.value), "slice": f"step {metric.step}"}
