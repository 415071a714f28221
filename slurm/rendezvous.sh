# The ranks meet at the job's own first node, never at the host that submitted; the port follows from the job's id.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
[ "${#hosts[@]}" -gt 0 ] || fail "scontrol show hostnames $SLURM_JOB_NODELIST gave nothing"
export MASTER_ADDR=${hosts[0]} MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
echo "rendezvous at $MASTER_ADDR:$MASTER_PORT of ${hosts[*]}; OMP_NUM_THREADS=$OMP_NUM_THREADS"
env | grep -E '^(NCCL|GLOO|TORCH_NCCL)_' || echo "no NCCL_ or GLOO_ settings"
