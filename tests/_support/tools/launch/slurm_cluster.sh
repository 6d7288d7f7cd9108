#!/bin/bash
# In namespaces of its own: the head node, and a node in more namespaces for each of $2. $1: the folder.
set -eu
folder=$1 nodes=$2 cores=$3
mkdir -p "$folder"/{munge,state,log}

# A network: a bridge on the head, a veth pair to each node; names for the addresses.
hostname head
ip link set lo up
ip link add bridge0 type bridge
ip addr add 10.77.0.1/24 dev bridge0
ip link set bridge0 up
{
    echo "127.0.0.1 localhost"
    echo "10.77.0.1 head"
    for i in $(seq "$nodes"); do echo "10.77.0.$((10 + i)) node$i"; done
} > "$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts

# munge vouches for users; --force because the folder may be in one that others can write to.
(umask 077 && head -c 1024 /dev/urandom > "$folder/munge/key")
munged --force --foreground --key-file="$folder/munge/key" --socket="$folder/munge/socket" \
    --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" &

# cred_expire: how long a requeued job waits, by default two minutes. pgid, task/none: no cgroups; a
# signal comes to what srun started and not to the processes of torchrun, as under proctrack/cgroup.
cat > "$folder/slurm.conf" << CONF
ClusterName=tiny
SlurmctldHost=head
SlurmUser=root
SlurmdUser=root
AuthInfo=socket=$folder/munge/socket,cred_expire=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool.%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmctldLogFile=$folder/log/slurmctld
SlurmdLogFile=$folder/log/slurmd.%n
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
KillWait=5
NodeName=node[1-$nodes] NodeAddr=10.77.0.[11-$((10 + nodes))] CPUs=$cores RealMemory=2000
PartitionName=main Nodes=ALL Default=YES State=UP
CONF
export SLURM_CONF="$folder/slurm.conf"

for i in $(seq "$nodes"); do
    mkdir -p "$folder/spool.node$i"
    unshare --net --uts --mount --pid --fork --kill-child --mount-proc bash -c "
        hostname node$i
        ip link set lo up
        until ip link show eth0 > /dev/null 2>&1; do sleep 0.02; done
        ip addr add 10.77.0.$((10 + i))/24 dev eth0
        ip link set eth0 up
        slurmd -D -N node$i -f '$folder/slurm.conf' &
        wait  # as process 1: slurmd would leave processes whose parents are gone as zombies, and wait for them
        " &
    until namespace=$(pgrep -P $!); do sleep 0.02; done
    until ip link add "veth$i" type veth peer name eth0 netns "$namespace"; do sleep 0.02; done
    ip link set "veth$i" master bridge0 up
done

until munge -S "$folder/munge/socket" -n > /dev/null 2>&1; do sleep 0.05; done
slurmctld -D -f "$folder/slurm.conf" &
until [ "$(sinfo --noheader --Node --states=idle 2> /dev/null | wc -l)" -eq "$nodes" ]; do sleep 0.1; done
touch "$folder/ready"
wait
