#!/usr/bin/env bash
# A preset at small size through `sweep submit` on real GPUs under a real Slurm: unpacked, packed, with one requeue.
#
#   SLURM_CONF=... bash tests/gpu/slurm_proof.sh OUT_FOLDER
#
# Wants sbatch on PATH and a partition `main` with GPUs. PYTHON is the command that runs Python in jobs, DEVICE cuda or
# cpu (to try the script itself), SIZE a named size, STEPS the length of a run. Results: OUT_FOLDER/proof.json.
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
python=${PYTHON:-python3} device=${DEVICE:-cuda} size=${SIZE:-1.6m} steps=${STEPS:-300}
work=$(mktemp -d "${TMPDIR:-/tmp}/proof.XXXX")
export SCALING_SITE=$work/site.yaml
cat >"$SCALING_SITE" <<YAML
partition: main
python: $python
gpu: ${GPU:-h200}
YAML
scaling() { $python -m scaling "$@"; }
seconds() { date +%s.%N; }
$python - "$work/store" <<'PY'
import sys
from scaling.corpus import prepare
from scaling.corpus.library import python_library_documents
prepare(python_library_documents(), sys.argv[1], vocab_size=1024, held_out_fraction=0.2)
PY
echo "store ready"
common=(--set "size=$size" --set "data.path=$work/store" --set "data.seq_len=256" --set "data.batch_size=${BATCH:-32}"
        --set "schedule.steps=$steps" --set "schedule.tokens_per_parameter=null" --set "run.device=$device"
        --set "precision.mode=${PRECISION:-mixed}" --set "evaluation.num_sequences=16" --set "optimizer.lr=3e-3"
        --set "run.log_every_steps=20" --set "seed=${SEEDS:-[0,1,2,3]}" --set "resources.signal=10" --set "resources.time=10"
        --set "resources.cpus=2" --set "resources.gpus=${GPUS:-1}")
follow() { # follow NAME ARGS...: submit, wait, keep the states and the time
  local name=$1 begun; shift
  begun=$(seconds)
  scaling sweep submit quickstart --yes --json --out "$work/$name" "${common[@]}" "$@" >"$work/$name.submit.json"
  until scaling sweep status quickstart --out "$work/$name" --json >"$work/$name.status.json"; do
    grep -q '"over": true' "$work/$name.status.json" && break
    sleep 1
  done
  echo "$(seconds) - $begun" | $python -c "print(eval(input()))" >"$work/$name.seconds"
  echo "$name: $(cat "$work/$name.seconds") s"
  if grep -q '"state": "failed"' "$work/$name.status.json"; then
    scaling sweep logs quickstart --out "$work/$name" --state failed --lines 30 | head -60
    exit 1
  fi
}
follow unpacked
follow packed --set resources.runs_per_gpu=4
begun=$(seconds)
scaling sweep submit quickstart --yes --json --out "$work/requeue" "${common[@]}" --set "seed=[9]" --set method=baseline \
  --set "schedule.steps=$((steps * 3))" >"$work/requeue.submit.json"
job=$($python -c "import json,sys; print(json.load(open(sys.argv[1]))['job_ids'][0])" "$work/requeue.submit.json")
for _ in $(seq 240); do # half a minute of start-up at most is expected
  cat "$work"/requeue/*/metrics-0001.jsonl 2>/dev/null | grep -q . && break
  sleep 0.5
done
scancel --signal=USR2 "${job}_0"   # what Slurm sends before the time limit
until scaling sweep status quickstart --out "$work/requeue" --json >"$work/requeue.status.json"; do
  grep -q '"over": true' "$work/requeue.status.json" && break
  sleep 1
done
echo "$(seconds) - $begun" | $python -c "print(eval(input()))" >"$work/requeue.seconds"
cp "$work"/requeue/*/attempts.jsonl "$work/requeue.attempts.jsonl"
$python - "$work" "$out/proof.json" <<'PY'
import glob, json, sys
from pathlib import Path
work, result = Path(sys.argv[1]), {}
for name in ("unpacked", "packed", "requeue"):
    status = json.loads((work / f"{name}.status.json").read_text())
    submitted = json.loads((work / f"{name}.submit.json").read_text())
    seconds = float((work / f"{name}.seconds").read_text())
    tokens = sum(json.loads(Path(p).read_text())["final"].get("train/tokens", 0) for p in glob.glob(f"{work}/{name}/*/end.json"))
    result[name] = {"counts": status["counts"], "jobs": submitted["jobs"], "runs": submitted["runs"], "wall_time_s": seconds,
                    "tokens": tokens, "tokens_per_s_with_start": tokens / seconds,
                    "rows": [{k: row[k] for k in ("label", "state", "slurm_state", "reason", "step", "loss", "tokens_per_s", "attempts")} for row in status["runs"]]}
result["requeue"]["attempts"] = [json.loads(line) for line in (work / "requeue.attempts.jsonl").read_text().splitlines()]
Path(sys.argv[2]).write_text(json.dumps(result, indent=1) + "\n")
for name, one in result.items():
    print(name, one["counts"], f"{one['wall_time_s']:.1f} s", f"{one['tokens_per_s_with_start']:.0f} tokens/s with start-up")
PY
cp "$work"/*/_sweeps/quickstart/arrays/*/*.out "$out/" 2>/dev/null | head -3 || true
