"""The gated delta rule (`delta_rule`) as a GPU kernel: a whole block in one launch a layer.

One body in the common part of Metal's and CUDA's languages; a `Dialect` gives it the names of the
two. A state matrix S, fp32 [Dv, Dk], is spread over simdgroups (warps) of 32 lanes and stays in
registers for the whole block. With LANES = 8, of which a lane holds every eighth element of ROWS
state rows, one simdgroup holds PACK · ROWS of them (PACK = 32 / LANES):

                 Dk →   0 1 2 … 7 | 8 9 …          lane p of a row: elements p, p + 8, …
    state row 0         lanes 0 … 7                so a row's lanes read 32 bytes side by side,
    state row 1         lanes 8 … 15               and a key element once read serves ROWS rows
    state row 2         lanes 16 … 23
    state row 3         lanes 24 … 31
    state rows 4 … 7    the same lanes again, ROWS times

A sum over Dk is EACH = Dk / LANES products in one lane, then log2 LANES exchanges: always in that
order, whatever the block's length or the row's neighbours. So T steps give the bits of T blocks of
one step. The tape is the innovations d; a replay repeats S ← g S + d kᵀ by the very operations of
the forward (a product, then one fused multiply-add), so it arrives at the very state.

Three kernels share the body: `verify` leaves a tape and writes no state, `advance` stops each row
at its count and writes the state, `replay` reads a tape. In fp32 accumulation; inputs in fp32, fp16
or bf16.

What was run where: the body as C++ on a CPU, one thread a lane, against the steps; compiled for
NVIDIA's sm_90, without spills. `tests/benchmarks/delta_kernel.py` is for a GPU. Not run on Metal.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.gated_delta import compute_g

from dflash_batch.decoder.delta_rule import Block

SIMD = 32
"""Lanes of a simdgroup, on Apple's GPUs and NVIDIA's."""

SIMDGROUPS = 4
"""Most simdgroups of one threadgroup; they have the key in common."""

BODY = """
    constexpr int EACH = Dk / LANES;  // elements of one state row in a lane
    constexpr int PACK = 32 / LANES;  // state rows side by side in a simdgroup
    const int T = k_shape[1];
    const int row = n / Hv;
    const int head = n % Hv;
    const int part = lane % LANES;
    const int first = group * PACK * ROWS + lane / LANES;

    auto k_at = k + (size_t(row) * T * Hk + head / (Hv / Hk)) * Dk + part;
    auto g_at = g + size_t(row) * T * Hv + head;
    auto state_at = state + (size_t(n) * Dv + first) * Dk + part;
    const size_t outward = (size_t(row) * T * Hv + head) * Dv + first;
#if READS_TAPE
    auto d_at = d + outward;
#else
    auto q_at = q + (size_t(row) * T * Hk + head / (Hv / Hk)) * Dk + part;
    auto v_at = v + outward;
    auto beta_at = beta + size_t(row) * T * Hv + head;
    auto y_at = y + outward;
#endif
#if LEAVES_TAPE
    auto d_at = d + outward;
    const int stop = T;
#else
    auto end_at = end + (size_t(n) * Dv + first) * Dk + part;
    const int kept = count[row];
    const int stop = kept < T ? kept : T;
#endif

    float S[ROWS][EACH];
    #pragma unroll
    for (int j = 0; j < ROWS; ++j) {
      #pragma unroll
      for (int i = 0; i < EACH; ++i) {
        S[j][i] = state_at[j * PACK * Dk + i * LANES];
      }
    }

    for (int t = 0; t < stop; ++t) {
      const float decay = g_at[t * Hv];
      float key[EACH];
      #pragma unroll
      for (int i = 0; i < EACH; ++i) {
        key[i] = static_cast<float>(k_at[t * Hk * Dk + i * LANES]);
      }
#if READS_TAPE
      #pragma unroll
      for (int j = 0; j < ROWS; ++j) {
        const float delta = d_at[t * Hv * Dv + j * PACK];
        #pragma unroll
        for (int i = 0; i < EACH; ++i) {
          const float decayed = decay * S[j][i];
          S[j][i] = MULTIPLY_ADD(key[i], delta, decayed);
        }
      }
#else
      // All reads of a step up here, so that their delays run side by side.
      const float rate = static_cast<float>(beta_at[t * Hv]);
      float query[EACH];
      #pragma unroll
      for (int i = 0; i < EACH; ++i) {
        query[i] = static_cast<float>(q_at[t * Hk * Dk + i * LANES]);
      }
      float value[ROWS];
      #pragma unroll
      for (int j = 0; j < ROWS; ++j) {
        value[j] = static_cast<float>(v_at[t * Hv * Dv + j * PACK]);
      }
      float sum[ROWS];
      #pragma unroll
      for (int j = 0; j < ROWS; ++j) {
        sum[j] = 0.0f;
        #pragma unroll
        for (int i = 0; i < EACH; ++i) {
          S[j][i] = decay * S[j][i];
          sum[j] = MULTIPLY_ADD(S[j][i], key[i], sum[j]);
        }
      }
      #pragma unroll
      for (int by = LANES / 2; by > 0; by /= 2) {
        #pragma unroll
        for (int j = 0; j < ROWS; ++j) {
          sum[j] += OF_LANE_XOR(sum[j], by);
        }
      }
      float delta[ROWS];
      #pragma unroll
      for (int j = 0; j < ROWS; ++j) {
        delta[j] = rate * (value[j] - sum[j]);
        sum[j] = 0.0f;
      }
      #pragma unroll
      for (int i = 0; i < EACH; ++i) {
        #pragma unroll
        for (int j = 0; j < ROWS; ++j) {
          S[j][i] = MULTIPLY_ADD(key[i], delta[j], S[j][i]);
          sum[j] = MULTIPLY_ADD(S[j][i], query[i], sum[j]);
        }
      }
      #pragma unroll
      for (int by = LANES / 2; by > 0; by /= 2) {
        #pragma unroll
        for (int j = 0; j < ROWS; ++j) {
          sum[j] += OF_LANE_XOR(sum[j], by);
        }
      }
      if (part == 0) {
        #pragma unroll
        for (int j = 0; j < ROWS; ++j) {
          y_at[t * Hv * Dv + j * PACK] = static_cast<InT>(sum[j]);
#if LEAVES_TAPE
          d_at[t * Hv * Dv + j * PACK] = delta[j];
#endif
        }
      }
#endif
    }

#if !READS_TAPE && !LEAVES_TAPE
    // Padding reads these: they must be numbers.
    for (int t = stop; t < T; ++t) {
      if (part == 0) {
        for (int j = 0; j < ROWS; ++j) {
          y_at[t * Hv * Dv + j * PACK] = static_cast<InT>(0.0f);
        }
      }
    }
#endif
#if !LEAVES_TAPE
    #pragma unroll
    for (int j = 0; j < ROWS; ++j) {
      #pragma unroll
      for (int i = 0; i < EACH; ++i) {
        end_at[j * PACK * Dk + i * LANES] = S[j][i];
      }
    }
#endif
"""


class Dialect(NamedTuple):
    """What one GPU language says in its own way."""

    build: Callable[..., Any]  # a kernel of MLX: mx.fast.metal_kernel or its like
    entry: str  # sets lane, group and n; in the body's text, where MLX looks for Metal's names
    header: str
    held: int  # most state elements in one lane: registers


METAL = Dialect(
    build=mx.fast.metal_kernel,
    entry="""
    const int lane = int(thread_position_in_threadgroup.x);
    const int group = int(thread_position_in_grid.y);
    const int n = int(thread_position_in_grid.z);
""",
    header="""
#define OF_LANE_XOR(x, by) simd_shuffle_xor(x, ushort(by))
#define MULTIPLY_ADD(a, b, c) metal::fma(a, b, c)
""",
    held=32,
)

CUDA = Dialect(
    build=mx.fast.cuda_kernel,
    entry="""
    const int lane = int(threadIdx.x);
    const int group = int(blockIdx.y * blockDim.y + threadIdx.y);
    const int n = int(blockIdx.z);
""",
    header="""
#define OF_LANE_XOR(x, by) __shfl_xor_sync(0xffffffffu, x, by)
#define MULTIPLY_ADD(a, b, c) __fmaf_rn(a, b, c)
""",
    held=64,
)


class Tile(NamedTuple):
    """The part of a state matrix that one simdgroup holds."""

    lanes: int  # that share one state row
    rows: int  # state rows of each lane

    @property
    def height(self) -> int:
        return SIMD // self.lanes * self.rows


def tile_for(key_dim: int, value_dim: int, held: int) -> Tile:
    """The tallest tile of few lanes that divides [Dv, Dk]. Raises ValueError if none does."""
    for lanes in (8, 16, 32):
        for rows in (8, 4, 2, 1):
            tile = Tile(lanes, rows)
            fits = key_dim // lanes * rows <= held
            if fits and key_dim % lanes == 0 and value_dim % tile.height == 0:
                return tile
    raise ValueError(f"no tile of the delta kernel divides a state of {value_dim} x {key_dim}")


Extent = tuple[int, int, int]


def extent(rows: int, heads: int, value_dim: int, tile: Tile) -> tuple[Extent, Extent]:
    """Threads of the grid and of a threadgroup: (lane, part of a state matrix, state matrix)."""
    groups = value_dim // tile.height
    return (SIMD, groups, rows * heads), (SIMD, gcd(groups, SIMDGROUPS), 1)


class KernelTape(NamedTuple):
    """What a replay reads."""

    k: mx.array  # [R, T, Hk, Dk]
    g: mx.array  # fp32 [R, T, Hv] the decays
    d: mx.array  # fp32 [R, T, Hv, Dv] the innovations


class Kernel:
    """The form (`delta_rule.Rule`) that is one launch. Raises what MLX raises when it cannot be."""

    def __init__(self, dialect: Dialect, tile: Tile | None = None) -> None:
        self._dialect = dialect
        self._tile = tile
        block = ["q", "k", "v", "g", "beta", "state"]
        self._verify = self._build("verify", block, ["y", "d"])
        self._advance = self._build("advance", [*block, "count"], ["y", "end"])
        self._replay = self._build("replay", ["k", "g", "d", "state", "count"], ["end"])

    def verify(self, block: Block, state: mx.array) -> tuple[mx.array, KernelTape]:
        inputs = _read(block)
        q, k, v, g, _ = inputs
        y, d = self._launch(
            self._verify, k, v.shape, [*inputs, state], (v.shape, q.dtype), (v.shape, mx.float32)
        )
        return y, KernelTape(k, g, d)

    def advance(self, block: Block, state: mx.array, keep: mx.array) -> tuple[mx.array, mx.array]:
        inputs = _read(block)
        q, k, v = inputs[:3]
        y, end = self._launch(
            self._advance,
            k,
            v.shape,
            [*inputs, state, keep],
            (v.shape, q.dtype),
            (state.shape, mx.float32),
        )
        return y, end

    def replay(self, tape: KernelTape, state: mx.array, keep: mx.array) -> mx.array:
        k, g, d = tape
        (end,) = self._launch(
            self._replay, k, d.shape, [k, g, d, state, keep], (state.shape, mx.float32)
        )
        return end

    def _build(self, name: str, inputs: list[str], outputs: list[str]) -> Any:
        tape = f"#define READS_TAPE {int('d' in inputs)}\n#define LEAVES_TAPE {int('d' in outputs)}"
        return self._dialect.build(
            name=f"gated_delta_{name}",
            input_names=inputs,
            output_names=outputs,
            source=self._dialect.entry + BODY,
            header=f"{self._dialect.header}{tape}\n",
        )

    def _launch(
        self,
        kernel: Any,
        k: mx.array,
        values: tuple[int, ...],
        inputs: list[mx.array],
        *outputs: tuple[tuple[int, ...], mx.Dtype],
    ) -> list[mx.array]:
        """`values` is the shape [R, T, Hv, Dv]; an output is a shape and a dtype."""
        rows, _, heads, value_dim = values
        key_heads, key_dim = k.shape[2:]
        tile = self._tile or tile_for(key_dim, value_dim, self._dialect.held)
        grid, threadgroup = extent(rows, heads, value_dim, tile)
        constants = {
            "InT": k.dtype,
            "Hk": key_heads,
            "Hv": heads,
            "Dk": key_dim,
            "Dv": value_dim,
            "LANES": tile.lanes,
            "ROWS": tile.rows,
            # MLX keeps the compiled kernel by its name and these, and on Metal an input of fewer
            # than 8 elements, as the counts may be, is declared another way.
            "FEW": rows < 8,
        }
        made: list[mx.array] = kernel(
            inputs=inputs,
            template=list(constants.items()),
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )
        return made


def _read(block: Block) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
    """q, k, v, g and β of a block, all but g (fp32) in q's dtype."""
    dtype = block.q.dtype
    k, v, beta = (x.astype(dtype) for x in (block.k, block.v, mx.sigmoid(block.b)))
    return block.q, k, v, compute_g(block.A_log, block.a, block.dt_bias), beta
