"""Stand-ins for the cloud providers: the real Terraform core talks to them, no cloud and no download is needed.

A double knows its provider's schema (`schemas/*.json`, the format of `terraform providers schema -json`) and
the rules of `rules.json` (enumerations, patterns and conflicts that a schema cannot say). Core itself rejects
what the schema forbids; the double rejects what the rules forbid and values for attributes that only the provider
sets. Plan, apply and read make up every value the cloud would have chosen, the same on every run. Nothing here
proves that a cloud accepts a plan.

    provider_double.py plugin NAME    what Terraform starts from a filesystem mirror (see `write_mirror`)
    provider_double.py serve          all doubles in one process; prints TF_REATTACH_PROVIDERS, ends with its stdin
"""

from __future__ import annotations

import argparse
import base64
import datetime
import hashlib
import json
import os
import re
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCHEMAS = {"aws": "aws.json", "google": "google.json", "oci": "oci.json"}

Value = Any  # what MessagePack gives: None, bool, int, float, str, list, dict, or an ExtType for "unknown"
Path_ = tuple[str | int, ...]


# --- Schemas -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProviderSchema:
    """One provider's schema file.

    `source` is the address without version, such as "registry.terraform.io/hashicorp/aws"; `resources` and `data` map a
    type to its block.
    """

    name: str
    source: str
    version: str
    provider: Mapping[str, Any]
    resources: Mapping[str, Mapping[str, Any]]
    data: Mapping[str, Mapping[str, Any]]

    @classmethod
    def load(cls, name: str) -> ProviderSchema:
        document = json.loads((HERE / "schemas" / SCHEMAS[name]).read_text())
        ((source, body),) = document["provider_schemas"].items()
        return cls(
            name=name,
            source=source,
            version=document["x_provider_version"],
            provider=body["provider"]["block"],
            resources={key: schema["block"] for key, schema in body["resource_schemas"].items()},
            data={key: schema["block"] for key, schema in body["data_source_schemas"].items()},
        )


def attributes(
    block: Mapping[str, Any], value: Value, at: Path_ = ()
) -> Iterator[tuple[Path_, Mapping[str, Any], Value, dict]]:
    """Every attribute of `value` with its path, its schema and the object it is in, nested blocks included."""
    if not isinstance(value, dict):
        return
    for name, attribute in block.get("attributes", {}).items():
        yield (*at, name), attribute, value.get(name), value
    for name, nested in block.get("block_types", {}).items():
        inner = value.get(name)
        for index, item in enumerate(inner if isinstance(inner, list) else [inner]):
            step = (*at, name, index) if isinstance(inner, list) else (*at, name)
            yield from attributes(nested["block"], item, step)


# --- Rules ---------------------------------------------------------------------------------------------------------


def violations(
    rules: Mapping[str, Any], type_name: str, block: Mapping[str, Any], config: Value
) -> Iterator[tuple[Path_, str]]:
    """What the double objects to in one resource's or data source's configuration: (path, message)."""
    own = rules.get(type_name, {})
    for path, attribute, value, _ in attributes(block, config):
        if value is None or not _known(value):
            continue
        dotted = ".".join(step for step in path if isinstance(step, str))
        if attribute.get("computed") and not attribute.get("optional") and not attribute.get("required"):
            yield (
                path,
                f"{type_name}.{dotted}: only the provider sets this attribute; it cannot be configured.",
            )
        rule = own.get("values", {}).get(dotted)
        for item in (value if isinstance(value, list) else [value]) if rule else []:
            if not _known(item):
                continue
            if "one_of" in rule and item not in rule["one_of"]:
                yield path, f"{type_name}.{dotted}: expected one of {rule['one_of']}, got {json.dumps(item)}."
            if "pattern" in rule and not re.fullmatch(rule["pattern"], str(item)):
                yield path, f"{type_name}.{dotted}: {json.dumps(item)} does not match {rule['pattern']}."
            if "min" in rule and not rule["min"] <= item <= rule["max"]:
                yield path, f"{type_name}.{dotted}: expected {rule['min']} to {rule['max']}, got {item}."
    for names in own.get("conflicts", []):
        given = [name for name in names if isinstance(config, dict) and config.get(name) not in (None, [])]
        if len(given) > 1:
            yield (given[1],), f"{type_name}: {' and '.join(given)} conflict; set one of them."


def _known(value: Value) -> bool:
    import msgpack

    return not isinstance(value, msgpack.ExtType)


# --- What a cloud would have answered ------------------------------------------------------------------------------


def invent(
    type_name: str, path: Path_, attribute_type: Any, around: Mapping[str, Any], answers: Mapping[str, Any]
) -> Value:
    """A value for one computed attribute: from answers.json, else made from where it stands: always the same."""
    dotted = ".".join(str(step) for step in path if isinstance(step, str))
    if f"{type_name}.{dotted}" in answers:
        return answers[f"{type_name}.{dotted}"]
    seed = int(
        hashlib.sha256(json.dumps([type_name, path, _identity(around)], sort_keys=True).encode()).hexdigest(),
        16,
    )
    if attribute_type == "bool":
        return False
    if attribute_type == "number":
        return 0
    if attribute_type == "string":
        if re.search(r"(^|_)(ip|ip_address|network_ip|private_ip|nat_ip|public_ip)$", str(path[-1])):
            network = "203.0.113" if re.search("public|nat", str(path[-1])) else f"10.0.{seed // 256 % 256}"
            return f"{network}.{1 + seed % 254}"
        return f"{type_name.replace('_', '-')}-{path[-1]}-{seed % 16**8:08x}"
    if isinstance(attribute_type, list) and attribute_type[0] in ("list", "set"):
        return []
    return {} if isinstance(attribute_type, list) and attribute_type[0] == "map" else None


def _identity(around: Mapping[str, Any]) -> Any:
    """What tells two resources of one type apart: their configured, known scalars."""
    return {
        key: value
        for key, value in around.items()
        if isinstance(value, (str, int, bool)) and value is not None
    } | {
        key: value
        for key, value in around.items()
        if key in ("tags", "labels", "freeform_tags") and isinstance(value, dict)
    }


# --- The protocol --------------------------------------------------------------------------------------------------


def _unknown() -> Any:
    import msgpack

    return msgpack.ExtType(0, b"\x00")


def _decode(dynamic: Any) -> Value:
    import msgpack

    if dynamic.json:
        return json.loads(dynamic.json)
    return msgpack.unpackb(dynamic.msgpack, strict_map_key=False) if dynamic.msgpack else None


def _encode(value: Value) -> Any:
    import msgpack
    from tf.gen import tfplugin_pb2 as pb

    return pb.DynamicValue(msgpack=msgpack.packb(value))


def _block_message(block: Mapping[str, Any]) -> Any:
    from tf.gen import tfplugin_pb2 as pb

    modes = pb.Schema.NestedBlock.NestingMode
    return pb.Schema.Block(
        attributes=[
            pb.Schema.Attribute(
                name=name,
                type=json.dumps(attribute["type"]).encode(),
                required=attribute.get("required", False),
                optional=attribute.get("optional", False),
                computed=attribute.get("computed", False),
                sensitive=attribute.get("sensitive", False),
            )
            for name, attribute in block.get("attributes", {}).items()
        ],
        block_types=[
            pb.Schema.NestedBlock(
                type_name=name,
                block=_block_message(nested["block"]),
                nesting=modes.Value(nested["nesting_mode"].upper()),
                min_items=nested.get("min_items", 0),
                max_items=nested.get("max_items", 0),
            )
            for name, nested in block.get("block_types", {}).items()
        ],
    )


def make_servicer(schema: ProviderSchema) -> Any:
    """The protocol-6 service of one double."""
    from tf.gen import tfplugin_pb2 as pb
    from tf.gen import tfplugin_pb2_grpc as rpc

    rules = json.loads((HERE / "rules.json").read_text())
    answers = json.loads((HERE / "answers.json").read_text())

    def diagnostics(found: Iterator[tuple[Path_, str]]) -> list[Any]:
        result = []
        for path, message in found:
            steps = [
                pb.AttributePath.Step(attribute_name=step)
                if isinstance(step, str)
                else pb.AttributePath.Step(element_key_int=step)
                for step in path
            ]
            result.append(
                pb.Diagnostic(
                    severity=pb.Diagnostic.ERROR, summary=message, attribute=pb.AttributePath(steps=steps)
                )
            )
        return result

    def fill(
        type_name: str,
        block: Mapping[str, Any],
        value: Value,
        chosen: Callable[[Path_, Any, dict], Value],
        when: Any,
    ) -> Value:
        for path, attribute, current, owner in list(attributes(block, value)):
            if attribute.get("computed") and when(current):
                owner[str(path[-1])] = chosen(path, attribute["type"], value)
        return value

    class Servicer(rpc.ProviderServicer):
        def GetProviderSchema(self, request: Any, context: Any) -> Any:
            def message(block: Mapping[str, Any]) -> Any:
                return pb.Schema(version=0, block=_block_message(block))

            return pb.GetProviderSchema.Response(
                provider=message(schema.provider),
                resource_schemas={name: message(block) for name, block in schema.resources.items()},
                data_source_schemas={name: message(block) for name, block in schema.data.items()},
            )

        def ValidateProviderConfig(self, request: Any, context: Any) -> Any:
            return pb.ValidateProviderConfig.Response()

        def ConfigureProvider(self, request: Any, context: Any) -> Any:
            return pb.ConfigureProvider.Response()

        def ValidateResourceConfig(self, request: Any, context: Any) -> Any:
            block = schema.resources[request.type_name]
            found = violations(rules, request.type_name, block, _decode(request.config))
            return pb.ValidateResourceConfig.Response(diagnostics=diagnostics(found))

        def ValidateDataResourceConfig(self, request: Any, context: Any) -> Any:
            block = schema.data[request.type_name]
            found = violations(rules, f"data.{request.type_name}", block, _decode(request.config))
            return pb.ValidateDataResourceConfig.Response(diagnostics=diagnostics(found))

        def UpgradeResourceState(self, request: Any, context: Any) -> Any:
            return pb.UpgradeResourceState.Response(
                upgraded_state=pb.DynamicValue(json=request.raw_state.json)
            )

        def ReadResource(self, request: Any, context: Any) -> Any:
            return pb.ReadResource.Response(new_state=request.current_state)

        def PlanResourceChange(self, request: Any, context: Any) -> Any:
            planned = _decode(request.proposed_new_state)
            if planned is not None and _decode(request.prior_state) is None:
                block = schema.resources[request.type_name]
                fill(
                    request.type_name, block, planned, lambda *_: _unknown(), lambda current: current is None
                )
            return pb.PlanResourceChange.Response(planned_state=_encode(planned))

        def ApplyResourceChange(self, request: Any, context: Any) -> Any:
            state = _decode(request.planned_state)
            if state is not None:
                name, block = request.type_name, schema.resources[request.type_name]
                fill(
                    name,
                    block,
                    state,
                    lambda path, kind, top: invent(name, path, kind, top, answers),
                    lambda current: not _known(current),
                )
            return pb.ApplyResourceChange.Response(new_state=_encode(state))

        def ReadDataSource(self, request: Any, context: Any) -> Any:
            name, block = f"data.{request.type_name}", schema.data[request.type_name]
            state = _decode(request.config)
            fill(
                name,
                block,
                state,
                lambda path, kind, top: invent(name, path, kind, top, answers),
                lambda current: current is None,
            )
            return pb.ReadDataSource.Response(state=_encode(state))

        def StopProvider(self, request: Any, context: Any) -> Any:
            return pb.StopProvider.Response()

    return Servicer()


def _certificate() -> tuple[bytes, bytes, bytes]:
    """A fresh self-signed certificate: (DER, PEM, private key PEM). Core insists on TLS towards a plugin it starts."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    usages = [x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=True)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding
    private = key.private_bytes(encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(encoding.DER), certificate.public_bytes(encoding.PEM), private


def _start(
    schema: ProviderSchema, socket: str, ended: threading.Event, tls: tuple[bytes, bytes] | None
) -> Any:
    """Serves one double on a Unix socket; `ended` is set when core asks it to stop."""
    import grpc
    from tf.gen import grpc_controller_pb2 as controller
    from tf.gen import grpc_controller_pb2_grpc as controller_rpc
    from tf.gen import grpc_stdio_pb2_grpc as stdio_rpc
    from tf.gen import tfplugin_pb2_grpc as rpc

    class Controller(controller_rpc.GRPCControllerServicer):
        def Shutdown(self, request: Any, context: Any) -> Any:
            context.add_callback(ended.set)
            return controller.Empty()

    class Stdio(stdio_rpc.GRPCStdioServicer):
        def StreamStdio(self, request: Any, context: Any) -> Any:
            return iter([])

    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    rpc.add_ProviderServicer_to_server(make_servicer(schema), server)
    controller_rpc.add_GRPCControllerServicer_to_server(Controller(), server)
    stdio_rpc.add_GRPCStdioServicer_to_server(Stdio(), server)
    if tls:
        server.add_secure_port(f"unix://{socket}", grpc.ssl_server_credentials([(tls[1], tls[0])]))
    else:
        server.add_insecure_port(f"unix://{socket}")
    server.start()
    return server


def plugin(name: str) -> None:
    """One double as Terraform starts it: the go-plugin handshake on stdout, then serving until told to stop."""
    der, pem, key = _certificate()
    ended = threading.Event()
    with tempfile.TemporaryDirectory(prefix="tfd") as folder:
        server = _start(ProviderSchema.load(name), f"{folder}/s", ended, (pem, key))
        print(
            "|".join(["1", "6", "unix", f"{folder}/s", "grpc", base64.b64encode(der).decode().rstrip("=")]),
            flush=True,
        )
        # Terraform that dies leaves an orphan; it is adopted by another process then.
        parent = os.getppid()
        while not ended.wait(0.5) and os.getppid() == parent:
            pass
        server.stop(grace=0).wait()


def serve() -> None:
    """All doubles in one long-lived process, for TF_REATTACH_PROVIDERS: a test run needs no start of its own."""
    with tempfile.TemporaryDirectory(prefix="tfd") as folder:
        reattach, servers = {}, []
        for name in SCHEMAS:
            schema = ProviderSchema.load(name)
            servers.append(_start(schema, f"{folder}/{name}", threading.Event(), None))
            reattach[schema.source] = {
                "Protocol": "grpc",
                "ProtocolVersion": 6,
                "Pid": os.getpid(),
                "Test": True,
                "Addr": {"Network": "unix", "String": f"{folder}/{name}"},
            }
        print(json.dumps(reattach), flush=True)
        sys.stdin.read()
        for server in servers:
            server.stop(grace=0).wait()


def write_mirror(folder: Path) -> Path:
    """Fills `folder` as a filesystem mirror of the doubles; returns the CLI configuration file that names it."""
    for name in SCHEMAS:
        schema = ProviderSchema.load(name)
        place = folder / schema.source / schema.version / "linux_amd64"
        place.mkdir(parents=True, exist_ok=True)
        executable = place / f"terraform-provider-{schema.source.rsplit('/', 1)[1]}_v{schema.version}"
        executable.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" plugin {name}\n'
        )
        executable.chmod(executable.stat().st_mode | stat.S_IXUSR)
    config = folder / "terraform.rc"
    config.write_text(f'provider_installation {{\n  filesystem_mirror {{\n    path = "{folder}"\n  }}\n}}\n')
    return config


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("plugin").add_argument("name", choices=SCHEMAS)
    commands.add_parser("serve")
    arguments = parser.parse_args()
    if arguments.command == "plugin":
        plugin(arguments.name)
    else:
        serve()


if __name__ == "__main__":
    main()
