"""Describe a checkpoint as an SPDX 3.0.1 document with its classes of AI and data sets.

In: a passport and the files that it travels with. Out: JSON-LD, built and checked by ``spdx-python-model``, whose
bindings are generated from the SHACL model (https://spdx.org/rdf/3.0.1/). The document claims the profiles core and
software only: those of AI and data sets need a supplier and a place of download, which no run knows.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from vorox.core.version import __version__
from vorox.training.passport.description import Files, Parent, Passport, library, package_url


def spdx(passport: Passport, files: Files) -> bytes:
    """Return the document."""
    return _Document(passport, files).encode()


class _Document:
    """A document under construction: elements, and relationships among them."""

    def __init__(self, passport: Passport, files: Files) -> None:
        self._v = library("spdx_python_model").v3_0_1
        self._base = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'urn:vorox:passport:{passport.digest}:spdx')}"
        self._elements: list[Any] = []
        self._info = self._v.CreationInfo(specVersion="3.0.1", created=passport.time)
        self._info._id = "_:creation"
        tool = self._add(self._v.SoftwareAgent, "vorox", name=f"Vorox {__version__}")
        self._info.createdBy = [tool]
        model = self._model(passport)
        self._relate(model, "contains", [self._file(index, *file) for index, file in enumerate(files.items())])
        for index, source in enumerate(passport.record["sources"]):
            self._source(index, source, model)
        self._relate(model, "descendantOf", [self._parent(index, one) for index, one in enumerate(passport.parents)])
        self._relate(model, "usesTool", [self._library(name, version) for name, version in passport.software.items()])
        members = list(self._elements)
        profiles = [self._v.ProfileIdentifierType.core, self._v.ProfileIdentifierType.software]
        self._add(
            self._v.SpdxDocument, "document", name=f"Passport of {passport.name}", element=members, rootElement=[model],
            profileConformance=profiles,
        )  # fmt: skip

    def encode(self) -> bytes:
        objects, target = self._v.SHACLObjectSet([self._info, *self._elements]), io.BytesIO()
        self._v.JSONLDSerializer().write(objects, target, indent=2, sort_keys=True)
        return target.getvalue() + b"\n"

    def _add(self, kind: Any, reference: str, **values: Any) -> Any:
        known = {key: value for key, value in values.items() if value is not None}
        element = kind(_id=f"{self._base}#{reference}", creationInfo=self._info, **known)
        self._elements.append(element)
        return element

    def _relate(self, element: Any, kind: str, others: Sequence[Any]) -> None:
        if others:
            self._add(
                self._v.Relationship, f"relationship-{len(self._elements)}", from_=element, to=list(others),
                relationshipType=getattr(self._v.RelationshipType, kind),
            )  # fmt: skip

    def _entries(self, values: Mapping[str, object]) -> list[Any]:
        make = self._v.DictionaryEntry
        return [make(key=key, value=str(value)) for key, value in values.items() if value is not None]

    def _model(self, passport: Passport) -> Any:
        general, v = passport.record["general"], self._v
        provider, started_from = general["provider"], general["initial_weights"]
        training = (
            f"{general['tokens']:,} tokens ({general['distinct_tokens']:,} distinct) of {general['documents']:,} "
            f"documents in {passport.record['steps']['applied']:,} updates, from "
            f"{'random weights' if started_from is None else 'other weights'}."
        )
        proof = {f"proof.{key}": value for key, value in passport.record["proof"].items()}
        identity = {
            "run": passport.run_id, "step": passport.step, "weights": passport.weights,
            "fingerprint": passport.fingerprint, "parameters": passport.num_parameters,
            "tokenizer": passport.tokenizer, "commit": passport.commit,
            **{f"signed_by.{index}": key for index, key in enumerate(passport.signed_by)},
        }  # fmt: skip
        return self._add(
            v.ai_AIPackage, "model",
            name=passport.name,
            software_packageVersion=f"step-{passport.step}",
            software_primaryPurpose=v.software_SoftwarePurpose.model,
            suppliedBy=self._add(v.Agent, "provider", name=provider) if provider else None,
            ai_typeOfModel=[kind for kind in (passport.model_type, passport.adapter) if kind],
            ai_informationAboutTraining=training,
            ai_hyperparameter=self._entries(passport.recipe),
            ai_metric=self._entries({f"{one.name} at step {one.step}": repr(one.value) for one in passport.metrics}),
            comment="\n".join(f"{key}: {value}" for key, value in (identity | proof).items() if value is not None),
        )  # fmt: skip

    def _file(self, index: int, name: str, content: tuple[int, str]) -> Any:
        size_bytes, sha256 = content
        digest = self._v.Hash(algorithm=self._v.HashAlgorithm.sha256, hashValue=sha256)
        return self._add(
            self._v.software_File, f"file-{index}", name=name, verifiedUsing=[digest], comment=f"{size_bytes} bytes"
        )

    def _source(self, index: int, source: Mapping[str, Any], model: Any) -> None:
        v, licence = self._v, source["licence"]
        counted = ("documents", "tokens", "distinct_tokens", "epochs", "share", "files_sha256", "content_sha256")
        sizes = "\n".join(f"{key}: {source[key]}" for key in counted if source[key] is not None)
        is_expression = licence is not None and _is_expression(licence)
        package = self._add(
            v.dataset_DatasetPackage, f"source-{index}",
            name=source["name"],
            description=source["description"],
            software_primaryPurpose=v.software_SoftwarePurpose.data,
            dataset_datasetType=[v.dataset_DatasetType.text],
            dataset_datasetSize=sum(file["size_bytes"] for file in source["files"]),
            dataset_dataPreprocessing=[transform["name"] for transform in source["transforms"]],
            comment=sizes if is_expression or licence is None else f"{sizes}\nlicence: {licence}",
        )  # fmt: skip
        self._relate(model, "trainedOn", [package])
        if is_expression:
            name = f"source-{index}-licence"
            expression = self._add(v.simplelicensing_LicenseExpression, name, simplelicensing_licenseExpression=licence)
            self._relate(package, "hasDeclaredLicense", [expression])

    def _parent(self, index: int, parent: Parent) -> Any:
        lines = [f"fingerprint: {parent.fingerprint}"] if parent.fingerprint else []
        lines += [f"checkpoint: {one.run} step {one.step} {one.fingerprint}" for one in parent.checkpoints]
        return self._add(
            self._v.ai_AIPackage, f"parent-{index}", name=parent.location, comment="\n".join(lines) or None,
            software_primaryPurpose=self._v.software_SoftwarePurpose.model,
        )  # fmt: skip

    def _library(self, name: str, version: str) -> Any:
        return self._add(
            self._v.software_Package, f"library-{name}", name=name, software_packageVersion=version,
            software_packageUrl=package_url(name, version),
        )  # fmt: skip


def _is_expression(text: str) -> bool:
    """Whether a licence is an SPDX licence expression; any other is a remark."""
    return library("cyclonedx.spdx").is_expression(text)
