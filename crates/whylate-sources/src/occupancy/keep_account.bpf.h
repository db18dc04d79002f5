/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Ends an interval of a CPU's account and begins the next one, with the thread that has the CPU. */
#pragma once

#include "occupancy.bpf.h"

static __always_inline bool open(struct account *account)
{
	if (account->is_busy) {
		account->nested++;
		return false;
	}
	account->is_busy = true;
	barrier();
	return true;
}

/* The account of this CPU, for one program at a time; NULL for a program that interrupts another one. */
static __always_inline struct account *open_account(u32 cpu)
{
	struct account *account = account_of(cpu);

	return account && open(account) ? account : NULL;
}

static __always_inline void close_account(struct account *account)
{
	barrier();
	account->is_busy = false;
}

static __always_inline struct interval *end_interval(struct account *account, u32 cpu, u64 now_ns)
{
	struct interval *interval = NULL;

	if (account->since_ns) {
		interval = interval_at(cpu, account->written);
		if (interval) {
			describe(interval, account);
			account->written++;
		}
	}
	account->nmi_seen_ns = account->nmi_ns;
	account->since_ns = now_ns;
	return interval;
}

/* The CPU's own pool for which a worker's item counts as in progress. */
static __always_inline u8 pool_of_worker(const struct task_struct *task)
{
	struct worker *worker;

	/* A worker that may run elsewhere belongs to no CPU's own pool. */
	if (task->nr_cpus_allowed != 1)
		return 0;
	worker = worker_of(task);
	/* Unbound workers may have one CPU left to run on; and no pool waits for a rescuer's items. */
	if (BPF_CORE_READ(worker, pool, cpu) < 0 || BPF_CORE_READ(worker, rescue_wq))
		return 0;
	/* A worker's nice value is its pool's, and a kernel thread's priority is 120 + nice. */
	return task->static_prio < 120 ? BUSY_HIGHPRI : BUSY_NORMAL;
}

static __always_inline void enter_worker(struct account *account, const struct task_struct *task)
{
	if (account->preempted_normal == account->tid)
		account->preempted_normal = 0;
	if (account->preempted_highpri == account->tid)
		account->preempted_highpri = 0;
	account->handler = handler_of_worker(task);
	if (account->handler)
		account->own_pool = pool_of_worker(task);
}

/* In words: half as long as a call of bpf_probe_read_kernel(). */
static __always_inline void read_name(char *name, const struct task_struct *task)
{
	const u64 *from = (const u64 *)task->comm;
	u64 *to = (u64 *)name;

	to[0] = from[0];
	to[1] = from[1];
}

/* The thread that has the CPU from now on. */
static __always_inline void enter_thread(struct account *account, const struct task_struct *task)
{
	account->own_pool = 0;
	account->handler = 0;
	account->tid = task->pid;
	if (own_namespace)
		account->shown_tid = shown_number(task);
	account->kind = task->pid ? OCCUPANT_THREAD : OCCUPANT_IDLE;
	account->cgroup = cgroup_number_of(task);
	read_name(account->name, task);
	if (task->flags & PF_WQ_WORKER)
		enter_worker(account, task);
}

/* Where a switch was not seen (some kernels hide a supervisor's threads), whoever had the CPU until now is unknown. */
static __always_inline bool is_astray(const struct account *account, const struct task_struct *task)
{
	return account->since_ns && account->tid != (u32)task->pid;
}

static __always_inline void forget_thread(struct account *account)
{
	account->kind = OCCUPANT_NOBODY;
	account->handler = 0;
	account->own_pool = 0;
	account->astray++;
}

/* Ends the present interval of a CPU whose thread stays. */
static __always_inline void end_interval_of_thread(struct account *account, u32 cpu)
{
	struct task_struct *task = bpf_get_current_task_btf();
	bool astray = is_astray(account, task);

	if (astray)
		forget_thread(account);
	end_interval(account, cpu, bpf_ktime_get_ns());
	if (astray)
		enter_thread(account, task);
}

/* A worker with an item that was preempted keeps its pool from starting another worker. */
static __always_inline void leave_worker(struct account *account, bool was_preempted)
{
	if (!was_preempted)
		return;
	if (account->own_pool == BUSY_NORMAL)
		account->preempted_normal = account->tid;
	if (account->own_pool == BUSY_HIGHPRI)
		account->preempted_highpri = account->tid;
}
