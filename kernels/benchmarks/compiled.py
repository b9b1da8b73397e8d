"""Compiles the shipped kernel configurations of the 2.7B shape without a GPU and prints what the compiler made of them.

usage: python kernels/benchmarks/compiled.py [sm_80 sm_90 sm_100]

One JSON object a line: kernel, target, registers, spilled (instructions that touch local memory), instructions in all
and, for the two elementwise loops, instructions per state element and token in the innermost loop that holds the
reciprocals; of the backward one also whether its tiles lie as its sums by tensor cores need it; values that Triton 3.6
would lose (`loops`). Limits stand in tests/kernels_triton/thresholds.toml.
"""

import argparse
import collections
import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import torch
    import triton
    import triton.language as tl
    from loops import used_as_bounds_alone
    from palimpsa_kernels.triton import (
        activations,
        adjoint,
        conv,
        decay,
        elementwise,
        incoming,
        norm,
        readout,
        ssd,
        states,
        step,
        targets,
    )
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
except ImportError as error:
    raise SystemExit(f"compiled.py needs torch, triton and PYTHONPATH=kernels: {error}") from None

TARGETS = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
K, V = 128, 64
CHANNELS = 80 * V
TYPES = {
    **dict.fromkeys(
        [
            "triangle",
            "k",
            "q",
            "v",
            "beta",
            "dy",
            "y",
            "dv",
            "dbeta",
            "dv_parts",
            "dbeta_parts",
            "dq",
            "x",
            "weight",
            "bias",
            "dx",
        ],
        "*bf16",
    ),
    **dict.fromkeys(
        ["dt", "logits", "value", "dvalue", "strength", "ddt", "dstrength", "dlogits", "z", "dz", "out"], "*bf16"
    ),
    **dict.fromkeys(["table"], "*i64"),
    **dict.fromkeys(["starts", "counts", "any_dense", "first_chunks", "counter", "place", "document"], "*i32"),
    **dict.fromkeys(["scale", "growth", "eps"], "fp32"),
}
INTEGERS = [
    "work",
    "first_chunk",
    "size",
    "slots",
    "span_slots",
    "H",
    "G",
    "heads_per_group",
    "initials",
    "first_final",
    "tokens",
    "splits",
    "D",
    "stride",
    "stride_q",
    "stride_k",
    "stride_qk",
    "stride_v",
    "stride_beta",
    "stride_dy",
    *("stride_x", "stride_dt", "stride_strength", "stride_logits", "stride_z"),
    *("rows", "first", "segment", "segments", "group_size", "C"),
]


@dataclass(frozen=True)
class Configuration:
    kernel: Any
    constants: dict[str, Any]
    warps: int
    types: dict[str, str]
    loop_elements: int = 0  # state elements of a thread in the elementwise loop
    stages: int = 3


def configurations(target: str) -> dict[str, Configuration]:
    """As launched on the target for bf16 inputs, unless named otherwise, of the 2.7B shape, H = 80, G = 1."""
    block_k, block_v = elementwise.tile_of(K, V, TARGETS[target])
    key_tile, key_tail = readout.key_tiles(K)
    value_tile = readout.ELEMENTS // triton.next_power_of_2(K)
    parts_k = triton.cdiv(K, block_k)
    shared = {"q": "*fp32", "k": "*fp32"}
    parts = dict.fromkeys(("row_parts", "dv_parts", "dbeta_parts"), "*bf16")
    number = TARGETS[target]
    incoming_options = {"K": K, "V": V, "BLOCK_K": K, "HAS_INITIAL": False, "OPERAND": tl.bfloat16}
    incoming_options |= targets.incoming_blocks(number, K, V, torch.bfloat16)
    one_block = incoming_options["BLOCK_V"] >= V
    incoming_options["STAGES"] = targets.incoming_stages(number, torch.bfloat16, one_block=one_block)
    ssd_options = {"K": K, "V": V, "BLOCK_T": ssd.CHUNK, "BLOCK_K": K, "BLOCK_V": V, "OPERAND": tl.bfloat16}
    ssd_options |= {"SUM": tl.float32}
    gradient_options = targets.ssd_gradient_options(number, V)
    gradient_warps = gradient_options.pop("num_warps")
    state_options = {"K": K, "V": V, "BLOCK_K": K, "BLOCK_V": V, "BLOCK_T": states.BLOCK_T, "SPLIT": True}
    passing = {"SIZE": K * V, "BLOCK": 1024, "HAS_INITIAL": False, "HAS_FINAL": False, "STORE": True}
    filtering = {"W": 4, "SILU": True, "HAS_BIAS": True, "HAS_INITIAL": False}
    forward_blocks = {"BLOCK_T": conv.BLOCK_T, "BLOCK_D": conv.BLOCK_D}
    walk = {name: value for name, value in conv.WALK.items() if name != "num_warps"}
    activating = {**activations.tile(V), "IMPORTANCE": True, "STRENGTH": False}
    norming = norm.block_sizes(CHANNELS)
    norm_warps = norming.pop("num_warps")
    norming |= {"GATED": True, "GIVEN": False}

    def adjoint_of(dense: bool, exact: bool = False) -> Configuration:
        constants = {"K": K, "V": V, "BLOCK_K": block_k, "BLOCK_V": block_v, "HAS_INITIAL": False, "EXACT": exact}
        constants |= {"EVEN": True, "PRIOR_GRADIENT": False, "DENSE": dense, "DENSE_BLOCK": elementwise.DENSE_BLOCK}
        constants |= {"STAGES": elementwise.DENSE_STAGES if dense else elementwise.STAGES, "WALK": elementwise.WALK}
        types = dict.fromkeys(("v", "beta", "dy", *parts), "*fp32") if exact else parts
        return Configuration(adjoint.adjoint_kernel, constants, 1, types, block_k * block_v // 32)

    return {
        "readout": Configuration(
            readout.readout_kernel,
            {"K": K, "V": V, "BLOCK_K": key_tile, "TAIL_K": key_tail, "BLOCK_V": value_tile, "HAS_INITIAL": False}
            | {"EVEN": True, "PAIRS": True, "STAGES": readout.STAGES},
            1,
            shared,
            readout.ELEMENTS // 32,
        ),
        "adjoint": adjoint_of(dense=False),
        "adjoint, dense": adjoint_of(dense=True),
        "adjoint, dense, fp32": adjoint_of(dense=True, exact=True),
        "chunk states": Configuration(states.chunk_state_kernel, state_options | {"IMPORTANCE": True}, 8, {}),
        "pass states": Configuration(states.pass_states_kernel, passing | {"STATES": 2}, 4, {}),
        "pass adjoints": Configuration(states.pass_adjoints_kernel, passing | {"STATES": 2}, 4, {}),
        "spans": Configuration(
            decay.span_kernel,
            {"BLOCK_H": 32, "GROUP": decay.GROUP},
            1,
            {},
        ),
        "incoming, M": Configuration(
            incoming.incoming_kernel,
            incoming_options | {"PARTS_K": parts_k, "KIND": 0, "STATES": 2, "BEFORE": False},
            8,
            {},
        ),
        "incoming, Ibar": Configuration(
            incoming.incoming_kernel,
            incoming_options | {"PARTS_K": parts_k, "KIND": 1, "STATES": 2, "BEFORE": False},
            8,
            {},
        ),
        "ssd states before": Configuration(
            incoming.incoming_kernel,
            incoming_options | {"PARTS_K": 1, "KIND": 0, "STATES": 1, "BEFORE": True},
            8,
            {"adjoints": "*bf16"},
        ),
        "ssd readout": Configuration(
            ssd.ssd_readout_kernel, ssd_options | {"HAS_INITIAL": False}, 4, {"states": "*bf16"}, stages=2
        ),
        "ssd gradient": Configuration(
            ssd.ssd_gradient_kernel, ssd_options | gradient_options, gradient_warps, {}, stages=2
        ),
        "ssd query and key": Configuration(
            ssd.ssd_query_key_gradient_kernel,
            {name: ssd_options[name] for name in ("K", "BLOCK_T", "BLOCK_K", "OPERAND")},
            4,
            {"dk": "*bf16", "dq_parts": "*fp32", "dk_parts": "*fp32"},
            stages=2,
        ),
        "step": Configuration(
            step.step_kernel,
            {"K": K, "V": V, "BLOCK_K": K, "BLOCK_V": step.ELEMENTS // K, "IMPORTANCE": True},
            4,
            {},
        ),
        "activations": Configuration(activations.activate_kernel, activating, 4, {}),
        "activation gradient": Configuration(
            activations.activation_gradient_kernel, activating | {"HAS_DY": True}, 4, {"D": "*fp32"}
        ),
        "activation gradient, strength": Configuration(
            activations.activation_gradient_kernel,
            activating | {"HAS_DY": True, "STRENGTH": True},
            4,
            {"D": "*fp32"},
        ),
        "norm": Configuration(norm.norm_kernel, norming, norm_warps, {}),
        "norm gradient": Configuration(norm.norm_gradient_kernel, norming | {"ROWS": norm.ROWS}, norm_warps, {}),
        "conv": Configuration(conv.conv_kernel, filtering | forward_blocks, 4, {}),
        "conv gradient": Configuration(conv.conv_gradient_kernel, filtering | walk, conv.WALK["num_warps"], {}),
    }


def compile_for(configuration: Configuration, capability: int) -> Any:
    """The kernel compiled for a target, with the alignment that contiguous tensors have."""
    signature: dict[str, str] = {}
    attributes = {}
    for i, parameter in enumerate(configuration.kernel.params):
        name = parameter.name
        if name in configuration.constants:
            signature[name] = "constexpr"
            continue
        default = "i32" if name in INTEGERS else TYPES.get(name, "*fp32")
        signature[name] = configuration.types.get(name, default)
        if signature[name].startswith("*") or (name in INTEGERS and not parameter.do_not_specialize):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(configuration.kernel, signature, configuration.constants, attributes)
    return triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": configuration.warps, "num_stages": configuration.stages},
    )


def disassemble(compiled: Any, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([CUOBJDUMP, option, file.name], capture_output=True, text=True, check=True).stdout


def opcodes(code: list[tuple[int, str]]) -> collections.Counter[str]:
    """How often each instruction occurs, without predicates and modifiers."""
    return collections.Counter(re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0] for _, text in code)


def smallest_loop(code: list[tuple[int, str]], reciprocals: int) -> int:
    """Instructions of the shortest loop with at least so many reciprocals."""
    place = {address: i for i, (address, _) in enumerate(code)}
    lengths = []
    for i, (address, text) in enumerate(code):
        branch = re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)
        if branch is None or int(branch[1], 16) >= address or int(branch[1], 16) not in place:
            continue
        body = code[place[int(branch[1], 16)] : i + 1]
        if opcodes(body)["MUFU"] >= reciprocals:
            lengths.append(len(body))
    return min(lengths)


def report(name: str, configuration: Configuration, target: str) -> dict[str, Any]:
    compiled = compile_for(configuration, TARGETS[target])
    pattern = r"/\*([0-9a-f]{4,6})\*/\s+(.*?);"
    code = [(int(m[1], 16), m[2]) for m in re.finditer(pattern, disassemble(compiled, "-sass"))]
    registers = re.search(r"REG:(\d+)", disassemble(compiled, "-res-usage"))
    counted = opcodes(code)
    entry = {
        "kernel": name,
        "target": target,
        "registers": int(registers[1]) if registers else None,
        "spilled": counted["LDL"] + counted["STL"],
        "instructions": len(code),
        "bounds_alone": used_as_bounds_alone(compiled.asm["ttir"]),
    }
    if configuration.loop_elements:
        loop = smallest_loop(code, configuration.loop_elements)
        entry["instructions_per_element"] = round(loop / configuration.loop_elements, 2)
    if configuration.kernel is adjoint.adjoint_kernel and not configuration.constants["EXACT"]:
        entry["tensor_cores"] = elementwise.layout_fits(compiled, configuration.constants["BLOCK_V"])
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; all of them if not given")
    targets = parser.parse_args().targets
    unknown = [target for target in targets if target not in TARGETS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: not among the targets {', '.join(TARGETS)}")
    if not isinstance(step.step_kernel, triton.JITFunction):
        parser.exit(2, "kernels compile only without TRITON_INTERPRET=1\n")
    for target in targets or TARGETS:
        for name, configuration in configurations(target).items():
            print(json.dumps(report(name, configuration, target)), flush=True)


if __name__ == "__main__":
    main()
