/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Steal time of a CPU. */
#pragma once

/*
 * From the CPU's `steal_time`, by its address, which KVM updates whenever it resumes the vCPU (arch/x86/kernel/kvm.c): it
 * is exact. 0 without such a clock, while nothing was stolen, or on a kernel that is not built as a KVM guest and lacks
 * the type.
 */
static __always_inline u64 exact_steal_ns(u64 address)
{
	const struct kvm_steal_time *steal = (const void *)address;

	if (!address || !bpf_core_field_exists(steal->steal))
		return 0;
	return BPF_CORE_READ(steal, steal);
}

/* Steal time that the run queue of a CPU knew at its last switch or tick. */
static __always_inline u64 steal_ns_of_queue(const struct cfs_rq *queue)
{
	if (!bpf_core_field_exists(struct sched_entity, cfs_rq) || !bpf_core_field_exists(struct rq, prev_steal_time_rq))
		return 0;
	return queue->rq->prev_steal_time_rq;
}
