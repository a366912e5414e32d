#!/usr/bin/env python3
"""Compares the YAML files of docs/examples with the schemas of Kubernetes and of the operators, and refuses unknown fields.

    tests/example_schemas.py CRD…

CRD: the definitions of Kubeflow's PyTorchJob and of Volcano's Job, as their repositories have them (docs/dev/releasing.md says
where). Kubernetes' own schema comes with kubernetes-validate. Needs, from PyPI: kubernetes-validate, jsonschema.
"""

import glob
import os
import sys

import jsonschema
import kubernetes_validate
import yaml

EXAMPLES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "docs/examples/*.yaml")


def strict(schema):
    """The schema without room for fields that it does not name."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    made = {}
    for key, value in schema.items():
        if key == "properties":
            value = {name: strict(field) for name, field in value.items()}
        elif key in ("items", "additionalProperties"):
            value = strict(value)
        made[key] = value
    if "properties" in made and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def definitions(files):
    """The strict schemas of the definitions, by the `apiVersion` and `kind` of what they define."""
    found = {}
    for file in files:
        with open(file, encoding="utf-8") as text:
            spec = yaml.safe_load(text)["spec"]
        for version in spec["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return found


def complaints(document, schemas):
    """What is wrong with one document."""
    own = schemas.get((document["apiVersion"], document["kind"]))
    if own is not None:
        for error in jsonschema.Draft202012Validator(own).iter_errors(document):
            yield f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
    elif "." in document["apiVersion"]:  # an operator's, of which kubernetes-validate would say nothing
        yield "its definition is not among the files"
    else:
        try:
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{'.'.join(map(str, error.path))}: {error.message}"


def main(files):
    schemas = definitions(files)
    wrong = 0
    for example in sorted(glob.glob(EXAMPLES)):
        with open(example, encoding="utf-8") as text:
            for document in yaml.safe_load_all(text):
                found = list(complaints(document, schemas))
                wrong += len(found)
                print(f"{os.path.basename(example)}: {document['apiVersion']} {document['kind']}: {'; '.join(found) or 'fits'}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
