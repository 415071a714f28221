# ---- the ground every job stands on (slurm/job.sh)
set -u

# SLURM sends USR1 to this script @{lead} s before the limit, and TERM when it takes the job away (scancel, pre-emption: then it queues it again by itself).
# srun hands USR1 on to the step: training finishes its optimiser step, saves and exits with 75; the other stages end at once, and go on from their files.
step='' stopped='' signalled=''
forward() { signalled=1 stopped=$1; [ -z "$step" ] || kill -USR1 "$step" 2>/dev/null; }
trap 'forward limit' USR1
trap 'forward taken' TERM

submission=$SLURM_SUBMIT_DIR # sbatch was called there; logs/ and config.yaml are beside this file
run_dir=$(dirname -- "$(dirname -- "$submission")")
task=${SLURM_ARRAY_TASK_ID:-0}
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$task} # of an array's task: the id alone may mean the whole array
job=${job:-$SLURM_JOB_ID}
restarts=${SLURM_RESTART_COUNT:-0}
name=$stage-${label:-$task} # label: what a task is called, where its number may change
log=$submission/logs/$stage-$job.log
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun does not inherit it (SLURM 22.05 and later)
export OMP_NUM_THREADS=$((${SLURM_CPUS_PER_TASK:-1} / processes > 0 ? ${SLURM_CPUS_PER_TASK:-1} / processes : 1))
@{env}
set +u # what is sourced here need not bear it
@{setup}
set -u
cd -- @{cwd} || exit 1 # relative paths of the configuration begin here
mkdir -p -- "$run_dir/slurm/done" "$run_dir/slurm/failed"
rm -f -- "$run_dir/slurm/failed/$name"
# Without what looks like a secret: by its name, or a URL with a user in it. A variable is one record, of however many lines.
env -0 | LC_ALL=C grep -zviE '^[a-z0-9_]*(token|key|secret|passw|credential)[a-z0-9_]*=|://[^[:space:]]*@' | sort -z | tr '\0' '\n' >"$submission/logs/$stage-$job.env"
echo "== $(date -u +%FT%TZ) $stage, task $task: job $job on ${SLURM_JOB_NODELIST:-?}, started $((restarts + 1)) times"

leave_if_replaced() { # SLURM has lost this node and starts the job anew: what goes on here marks nothing and queues nothing (srun gives 0 for a lost step)
  local state
  state=$(scontrol --oneliner show job "$job" | grep -oE ' (JobState|Restarts)=[^ ]*' | tr -d '\n')
  [ -z "$state" ] || [ "$state" = " JobState=RUNNING Restarts=$restarts" ] || { echo "== replaced (now$state), and ends" >&2; exit 1; }
}

fail() { # what failed and where to look; the jobs that depend on this one are cancelled
  leave_if_replaced
  printf '%s\njob %s on %s\nlog %s\n' "$1" "$job" "${SLURM_JOB_NODELIST:-?}" "$log" >"$run_dir/slurm/failed/$name"
  echo "error: $stage, task $task: $1" >&2
  exit 1
}

requeue() { # the same job, in the same directory
  leave_if_replaced
  [ "$restarts" -lt @{max_requeues} ] || fail "stopped by $1 after @{max_requeues} restarts (cluster.max_requeues): give it more time (cluster.time.$stage)"
  echo "== $(date -u +%FT%TZ) stopped by $1: queued again"
  trap '' TERM
  scontrol requeue "$job" || fail "stopped by $1, and scontrol requeue $job failed"
  exit 75
}

attempt() { # one command, in a step of its own; its exit code
  "$@" &
  step=$!
  local code
  while
    signalled=''
    wait "$step"
    code=$?
    [ -n "$signalled" ] # a signal ends wait, not the step
  do :; done
  step=''
  return "$code"
}

run() { # a command until it is done: stopped ones are queued again, failed ones tried @{retries} times more
  local code tries=0 most=$((1 + @{retries}))
  [ "$restarts" -eq 0 ] || most=$((most + 1)) # of a start whose node was lost, srun may live on there and kill this start's step: it has the same number
  while [ -z "$stopped" ]; do
    attempt "$@"
    code=$?
    [ "$code" -ne 0 ] || return 0
    [ -z "$stopped" ] || break
    [ "$code" -ne 75 ] || requeue "itself (exit code 75)"
    tries=$((tries + 1))
    [ "$tries" -lt "$most" ] || fail "exit code $code, after $tries attempts"
    echo "== $(date -u +%FT%TZ) exit code $code: attempt $((tries + 1)) of $most" >&2
  done
  [ "$stopped" = limit ] || { echo "== taken away by SLURM. If by the time limit, cluster.signal_lead_s=@{lead} is too short for a step and a checkpoint"; exit 75; }
  requeue "the time limit"
}

finish() { # leaves the mark by which a later submission knows that this is done; it appears whole
  local mark=$run_dir/slurm/done/$name
  leave_if_replaced
  printf '%s\n' "$fingerprint" >"$mark.$job~" || fail "cannot write $mark"
  mv -f -- "$mark.$job~" "$mark" || fail "cannot write $mark"
  echo "== $(date -u +%FT%TZ) $stage, task $task: done"
}
# ----
