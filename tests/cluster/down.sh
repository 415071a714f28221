#!/usr/bin/env bash
# Stops the cluster that `up.sh DIR` brought up: its jobs, orphans of killed nodes, then each daemon by the pid in its own file; removes DIR.
set -u # and no -e: whatever is gone already, the rest is stopped

[[ $# == 1 ]] || { echo "usage: $0 DIR" >&2; exit 1; }
dir=$(realpath -m -- "$1")
[[ -e $dir/env.sh ]] || { echo "$dir: no cluster here"; exit 0; }
export SLURM_CONF=$dir/slurm.conf

stop() { # pid: asks, then insists
  kill "$1" 2>/dev/null || return 0
  for ((i = 0; i < 50; i++)); do
    kill -0 "$1" 2>/dev/null || return 0
    sleep 0.1
  done
  kill -9 "$1" 2>/dev/null || true
}

stop_daemon() { # pid file; the pid may have gone to another program
  [[ -s $1 ]] && grep -qsF "$dir/" "/proc/$(<"$1")/cmdline" && stop "$(<"$1")"
}

timeout 10 scancel --quiet --user="$(id -un)" 2>/dev/null || true
for ((i = 0; i < 50; i++)); do
  [[ $(timeout 10 squeue -h 2>/dev/null) ]] || break
  sleep 0.2
done
for file in "$dir"/run/slurmd-*.pid "$dir"/run/slurmctld.pid; do
  stop_daemon "$file"
done
# What is left of jobs: their own processes, and their slurmstepd.
grep -lzxF "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ 2>/dev/null | while read -r environment; do
  process=${environment%/environ}
  if grep -qz '^SLURM_JOB_ID=' "$environment" || grep -qx slurmstepd "$process/comm"; then
    stop "${process#/proc/}"
  fi 2>/dev/null # it may be gone by now
done
stop_daemon "$dir/run/munged.pid"
(
  flock 9
  kept=$(grep -vxF "127.0.0.1 n1 n2 # $dir" /etc/hosts)
  echo "$kept" >/etc/hosts # in place: in a container it is a mount
) 9</etc
rm -rf "$dir"
