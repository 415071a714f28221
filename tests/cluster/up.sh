#!/usr/bin/env bash
# A throw-away SLURM cluster on this one machine: slurmctld, nodes n1 and n2 (2 CPUs, 2 fake GPUs each), own munge key, socket and ports.
#
#   tests/cluster/up.sh DIR      brings it up in about 10 s, all its state in DIR; again: starts only the daemons that are gone
#   . DIR/env.sh                 now sbatch, squeue, scontrol ... are those of this cluster
#   tests/cluster/down.sh DIR    stops it, by pid, and removes DIR
#
# Partition `main` runs jobs. Partition `h100` (h[1-4]: 8 H100, 128 CPUs, 2 TB each) is only said to be there: `sbatch --test-only` accepts what
# would fit, and nothing runs. Needs root, and Debian's packages slurm-wlm and munge, which are installed where they are missing.
set -euo pipefail

fail() { echo "error: $*" >&2; exit 1; }

[[ $# == 1 ]] || fail "usage: $0 DIR"
dir=$(realpath -m -- "$1")
[[ $dir =~ ^[A-Za-z0-9/._-]{1,80}$ ]] || fail "$dir: SLURM's files allow only letters, digits and ._- in at most 80 characters"
[[ $(id -u) == 0 ]] || fail "a test cluster needs root (nodes start jobs as their users, and their names go into /etc/hosts); this is $(id -un)"

if ! command -v slurmctld slurmd sbatch munged >/dev/null; then
  command -v apt-get >/dev/null || fail "slurmctld, slurmd, sbatch or munged is missing, and there is no apt-get to install slurm-wlm and munge with"
  log=$(mktemp)
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge; } >"$log" 2>&1 \
    || fail "apt-get cannot install slurm-wlm and munge: $(tail -5 "$log")"
  rm "$log"
fi

mkdir -p "$dir"/{log,munge,run,state,spool-n1,spool-n2}
chmod 755 "$dir"
chmod 700 "$dir/munge"
export SLURM_CONF=$dir/slurm.conf

configure() { # ports that nobody listens on now; job ids apart, because launchers derive their ports from them
  local host ports=() port gpu first_job=$((RANDOM % 30000 + 1000))
  host=$(hostname -s)
  while ((${#ports[@]} < 3)); do
    port=$((RANDOM % 10000 + 10000))
    [[ " ${ports[*]} " == *" $port "* ]] || (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || ports+=("$port")
  done
  head -c 1024 /dev/urandom >"$dir/munge/key"
  chmod 400 "$dir/munge/key"
  for gpu in {0..7}; do mknod "$dir/run/gpu$gpu" c 1 3; done # what a fake GPU is: a device like /dev/null
  cat >"$dir/gres.conf" <<CONF
NodeName=n[1-2] Name=gpu Flags=nvidia_gpu_env AutoDetect=off File=$dir/run/gpu[0-1]
NodeName=h[1-4] Name=gpu Type=h100 Flags=nvidia_gpu_env AutoDetect=off File=$dir/run/gpu[0-7]
CONF
  # cred_expire: a requeued job may start this many seconds (and not 120) later. MinJobAge: tests ask for jobs that ended long ago.
  # State=CLOUD: nodes that have yet to be switched on count for --test-only, those that do not answer would not.
  cat >"$SLURM_CONF" <<CONF
ClusterName=mtp-test
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort=${ports[0]}
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=1
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=15
KillWait=5
MinJobAge=86400
MessageTimeout=30
JobRequeue=1
FirstJobId=$first_job
GresTypes=gpu
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[1]} CPUs=2 RealMemory=8000 Gres=gpu:2 State=UNKNOWN
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[2]} CPUs=2 RealMemory=8000 Gres=gpu:2 State=UNKNOWN
NodeName=h[1-4] NodeAddr=127.0.0.1 CPUs=128 RealMemory=2000000 Gres=gpu:h100:8 State=CLOUD
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
PartitionName=h100 Nodes=h[1-4] MaxTime=INFINITE State=DOWN
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=86400
SuspendExcParts=main
CONF
  echo "export SLURM_CONF=$SLURM_CONF" >"$dir/env.sh"
}

alive() { # the pid may have gone to another program
  [[ -s $dir/run/$1.pid ]] && grep -qsF "$dir/" "/proc/$(<"$dir/run/$1.pid")/cmdline"
}

[[ -e $dir/env.sh ]] || configure
hosts="127.0.0.1 n1 n2 # $dir"
(
  flock 9
  grep -qxF "$hosts" /etc/hosts || echo "$hosts" >>/etc/hosts
) 9</etc
if ! alive munged; then
  rm -f "$dir"/run/munge.socket*
  munged --force --key-file="$dir/munge/key" --socket="$dir/run/munge.socket" --pid-file="$dir/run/munged.pid" \
    --log-file="$dir/log/munged.log" --seed-file="$dir/munge/seed" 2>>"$dir/log/munged.log" || fail "munged: $(tail -3 "$dir/log/munged.log")"
fi
alive slurmctld || slurmctld -f "$SLURM_CONF"
for node in n1 n2; do
  alive "slurmd-$node" || slurmd -N "$node" -f "$SLURM_CONF"
done
for ((i = 0; i < 300; i++)); do
  ready=$(sinfo -h -N -p main -o %T 2>/dev/null | grep -cE '^(idle|mixed|allocated|completing)$' || true)
  [[ $ready == 2 ]] && exit 0
  sleep 0.2
done
sinfo -N -l >&2 || true
tail -n 5 "$dir"/log/*.log >&2
fail "the nodes are not up after 60 s"
