#!/usr/bin/env bash
# Builds for the GPU of this machine, runs every test on it with none of the kernel tests skipped, then
# the benchmarks, and prints a short table last.
#
#   scripts/gpu_check.sh [--build DIR] [--out DIR] [--quick] [--peers] [--no-python]
#
#   --build DIR   build folder (default build/gpu)
#   --out DIR     where logs and JSON results go (default the build folder)
#   --quick       fewer benchmark points
#   --peers       also time FlashInfer and torch's attention where they can be imported
#   --no-python   leave out the Python module and its tests
#
# ASTRAI_GTEST_DIR names GoogleTest's sources where no package is installed and nothing can be fetched.
# ASTRAI_COMMIT is written into the results; default: git's own answer.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/gpu out="" quick="" peers=0 python=1
while [ $# -gt 0 ]; do
  case "$1" in
    --build) build=$2; shift ;;
    --out) out=$2; shift ;;
    --quick) quick=--quick ;;
    --peers) peers=1 ;;
    --no-python) python=0 ;;
    *) echo "gpu_check: unknown argument $1" >&2; exit 2 ;;
  esac
  shift
done
out=${out:-$build}
mkdir -p "$build" "$out"
failed=0

capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d '. ')
case "$capability" in
  90) architecture=90a ;;
  [0-9]*) architecture=$capability ;;
  *) echo "gpu_check: nvidia-smi reports no GPU" >&2; exit 1 ;;
esac
export ASTRAI_COMMIT=${ASTRAI_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$out/gpu.txt"

if [ $python = 1 ] && ! python3 -c 'import nanobind, pytest, torch' 2>/dev/null; then
  echo "gpu_check: no Python tests: python3 lacks nanobind, pytest or torch"
  python=0
fi

echo "== build for architecture $architecture"
start=$SECONDS
configure=(-S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DASTRAI_CUDA=ON
           "-DASTRAI_CUDA_ARCHITECTURES=$architecture" -DASTRAI_BUILD_TESTS=ON
           -DASTRAI_BUILD_BENCHMARKS=ON -DASTRAI_BUILD_PYTHON=$([ $python = 1 ] && echo ON || echo OFF))
if command -v ninja >/dev/null; then configure+=(-G Ninja); fi
if [ -n "${ASTRAI_GTEST_DIR:-}" ]; then configure+=("-DASTRAI_GTEST_DIR=$ASTRAI_GTEST_DIR"); fi
cmake "${configure[@]}" >"$out/configure.log" 2>&1 || { tail -n 20 "$out/configure.log"; exit 1; }
cmake --build "$build" --parallel >"$out/build.log" 2>&1 ||
  { grep -E -A3 'error|FAILED' "$out/build.log" | head -n 40; exit 1; }
echo "   $((SECONDS - start)) s"

echo "== ctest"
start=$SECONDS
ASTRAI_REQUIRE_GPU=1 ctest --test-dir "$build" --no-tests=error --output-on-failure -j 8 \
  >"$out/ctest.log" 2>&1 || failed=1
grep -E 'tests passed|\*\*\*|Skipped|\(Failed\)' "$out/ctest.log" | head -n 20 || true
echo "   $((SECONDS - start)) s"

if [ $python = 1 ]; then
  echo "== pytest -m gpu"
  status=0
  PYTHONPATH=python python3 -m pytest -q -m gpu tests/python >"$out/pytest.log" 2>&1 || status=$?
  grep -E '^(FAILED|ERROR)|Fatal Python error|passed|failed' "$out/pytest.log" | tail -n 20 || true
  # 5: no test is marked for the GPU.
  if [ $status != 0 ] && [ $status != 5 ]; then failed=1; fi
fi

echo "== benchmarks"
for phase in decode prefill; do
  bench=$([ $phase = decode ] && echo attn_cuda_bench || echo attn_prefill_cuda_bench)
  rm -f "$out/attn_${phase}_cuda.jsonl"
  "$build/benchmarks/cpp/$bench" $quick --json "$out/attn_${phase}_cuda.jsonl" \
    >"$out/attn_${phase}_cuda.txt" || failed=1
done
if [ $peers = 1 ]; then
  python3 benchmarks/python/attn_peers.py $quick --json "$out/attn_peers.jsonl" \
    >"$out/attn_peers.txt" 2>&1 || failed=1
  tail -n 90 "$out/attn_peers.txt"
fi
cat "$out/attn_decode_cuda.txt" "$out/attn_prefill_cuda.txt"
if [ $failed = 0 ]; then echo "gpu_check: all passed"; else echo "gpu_check: FAILED, see $out"; fi
exit $failed
