/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Whom threads that wait now wait for, by the words in which the kernel's locks keep who has them. Other threads go on
 * meanwhile, so there are three walks: one finds waits, the next one confirms those that go on with the same thread,
 * and the last one tells of both sides. A thread that a lock names is known by its address alone, and met as itself in
 * the last walk: nothing is taken from the memory of one that has ended.
 */
#pragma once

enum lock_kind {
	LOCK_NONE,
	LOCK_MUTEX,
	/* Whoever took it last may have let it go. */
	LOCK_SEMAPHORE,
	/* A writer has it. */
	LOCK_RWSEM,
	/* Readers have it. The word names the last that has come, which may have let it go. */
	LOCK_RWSEM_READERS,
	/* Of the kernel, or below a futex. */
	LOCK_RT_MUTEX,
	/* The thread flushes an item that a worker runs. */
	LOCK_WORK_ITEM,
};

enum holders_walk {
	HOLDERS_FIND,
	HOLDERS_CONFIRM,
	HOLDERS_TELL,
};

/* Flags in the owner words of mutexes and rwsems (kernel/locking). */
enum {
	/* It is handed to that thread, which has not woken yet. */
	MUTEX_PICKUP = 4,
	OWNER_FLAGS = 7,
	RWSEM_READER_OWNED = 1,
	RWSEM_WRITER_LOCKED = 1,
	RWSEM_READERS_SHIFT = 8,
	RT_MUTEX_HAS_WAITERS = 1,
};

enum holders_limits {
	/* Threads that wait or are waited for. */
	HOLDERS = 65536,
	BARRIERS = 8,
};

/* A thread that waits, or whom others wait for (then there is nothing in it). */
struct wait_for {
	/* The lock's address, or the function of the work item. */
	u64 lock;
	u64 holder;
	u64 switches;
	u32 kind;
	u32 is_confirmed;
};

struct holder_now {
	/* Addresses, which tell threads apart. `holder` is 0 of one that waits for nobody who is known. */
	u64 thread;
	u64 holder;
	/* The function of the work item that is waited for, and of the one that this thread runs. */
	u64 flushed;
	u64 handler;
	/* For how long it has been off its CPU; 0: it has one. */
	u64 off_cpu_ns;
	/* Of what it waits for. */
	u32 kind;
	/* As it is shown, and the kernel's. */
	u32 shown;
	u32 tid;
	u32 state;
	s32 syscall;
	u8 is_kernel;
	/* It has not run since the last walk, whose stack is that of this wait. */
	u8 is_as_walked;
	u8 unused[2];
	char comm[16];
};

struct {
	struct holder_now holder_now;
	enum lock_kind lock_kind;
	enum holders_walk holders_walk;
	enum holders_limits holders_limits;
} holder_layouts = {};

/* wq_barrier_func(); 0: who flushes an item is not known. */
const volatile u64 barrier_function = 0;
const volatile bool has_mutex_in_blocked_on = false;

u32 holders_walk = 0;

/* By the thread's address. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, HOLDERS);
	__type(key, u64);
	__type(value, struct wait_for);
} wait_by_thread SEC(".maps");

static __always_inline bool set_holder(struct wait_for *wait, enum lock_kind kind, u64 holder)
{
	wait->kind = kind;
	wait->holder = holder;
	return holder != 0;
}

/* Readers count in `count`: without any, what `owner` says of them is over. */
static __always_inline bool read_rwsem(struct wait_for *wait)
{
	const struct rw_semaphore *lock = (const void *)wait->lock;
	u64 count, owner;

	if (!bpf_core_field_exists(lock->count) || !bpf_core_field_exists(lock->owner))
		return false;
	count = BPF_CORE_READ(lock, count.counter);
	owner = BPF_CORE_READ(lock, owner.counter);
	if (count & RWSEM_WRITER_LOCKED)
		return !(owner & RWSEM_READER_OWNED) && set_holder(wait, LOCK_RWSEM, owner & ~(u64)OWNER_FLAGS);
	return count >> RWSEM_READERS_SHIFT && owner & RWSEM_READER_OWNED &&
	       set_holder(wait, LOCK_RWSEM_READERS, owner & ~(u64)OWNER_FLAGS);
}

static __always_inline bool read_mutex(struct wait_for *wait)
{
	const struct mutex *lock = (const void *)wait->lock;
	u64 owner;

	if (!bpf_core_field_exists(lock->owner))
		return false;
	owner = BPF_CORE_READ(lock, owner.counter);
	return !(owner & MUTEX_PICKUP) && set_holder(wait, LOCK_MUTEX, owner & ~(u64)OWNER_FLAGS);
}

/* Whether the lock that a thread sleeps for tells who has it. A lock that is gone reads as 0. */
static __always_inline bool read_lock(const struct task_struct *task, struct wait_for *wait)
{
	u64 blocker;

	if (bpf_core_field_exists(task->pi_blocked_on) && task->pi_blocked_on) {
		const struct rt_mutex_base *lock = BPF_CORE_READ(task, pi_blocked_on, lock);

		wait->lock = (u64)lock;
		return set_holder(wait, LOCK_RT_MUTEX, (u64)BPF_CORE_READ(lock, owner) & ~(u64)RT_MUTEX_HAS_WAITERS);
	}
	blocker = blocker_of(task, has_mutex_in_blocked_on);
	if (!blocker)
		return false;
	wait->lock = blocker & ~(u64)BLOCKER_KINDS;
	switch (blocker & BLOCKER_KINDS) {
	case BLOCKER_MUTEX:
		return read_mutex(wait);
	case BLOCKER_SEMAPHORE:
		return set_holder(wait, LOCK_SEMAPHORE, last_holder_of(wait->lock));
	default:
		return read_rwsem(wait);
	}
}

static __always_inline void keep_wait(u64 thread, const struct wait_for *wait)
{
	struct wait_for *known, none = {};

	if (holders_walk == HOLDERS_FIND) {
		if (bpf_map_update_elem(&wait_by_thread, &thread, wait, BPF_ANY)) {
			lose(LOST_HOLDERS);
			return;
		}
		thread = wait->holder;
		known = bpf_map_lookup_elem(&wait_by_thread, &thread);
		if (!known && bpf_map_update_elem(&wait_by_thread, &thread, &none, BPF_NOEXIST))
			lose(LOST_HOLDERS);
		return;
	}
	known = bpf_map_lookup_elem(&wait_by_thread, &thread);
	if (known && known->kind == wait->kind && known->lock == wait->lock && known->holder == wait->holder &&
	    known->switches == wait->switches)
		known->is_confirmed = true;
}

/* Whoever flushes the item that a worker runs has put a barrier behind it, which is on that thread's stack. */
static __always_inline void read_barriers(const struct task_struct *task)
{
	const struct worker *worker = worker_of(task);
	const struct list_head *all = (const void *)worker + bpf_core_field_offset(struct worker, scheduled);
	const struct list_head *entry = BPF_CORE_READ(worker, scheduled.next);
	u64 handler = (u64)BPF_CORE_READ(worker, current_func);

	if (!barrier_function || !handler || handler == barrier_function || !bpf_core_type_exists(struct wq_barrier))
		return;
	for (u32 i = 0; i < BARRIERS && entry && entry != all; i++) {
		const struct work_struct *work = (const void *)entry - bpf_core_field_offset(struct work_struct, entry);
		const struct wq_barrier *barrier = (const void *)work - bpf_core_field_offset(struct wq_barrier, work);

		if ((u64)BPF_CORE_READ(work, func) == barrier_function) {
			const struct task_struct *flusher = BPF_CORE_READ(barrier, task);
			struct wait_for wait = { .lock = handler, .holder = (u64)task, .kind = LOCK_WORK_ITEM };

			wait.switches = BPF_CORE_READ(flusher, nvcsw) + BPF_CORE_READ(flusher, nivcsw);
			keep_wait((u64)flusher, &wait);
		}
		entry = BPF_CORE_READ(entry, next);
	}
}

static __always_inline bool is_blocked(const struct task_struct *task)
{
	return !task->on_cpu && task->__state & ~TASK_WAKING;
}

static __always_inline void tell_holder(struct task_struct *task, struct bpf_iter__task *ctx)
{
	u64 thread = (u64)task, now_ns = bpf_ktime_get_ns();
	struct holder_now now = {};
	struct thread_record *record;
	struct wait_for *wait;

	wait = bpf_map_lookup_elem(&wait_by_thread, &thread);
	if (!wait || task->exit_state)
		return;
	now.thread = thread;
	if (wait->is_confirmed && wait->switches == switches_of(task) && is_blocked(task)) {
		now.holder = wait->holder;
		now.kind = wait->kind;
		if (now.kind == LOCK_WORK_ITEM)
			now.flushed = wait->lock;
		record = record_of(task);
		now.is_as_walked = record && record->is_known && record->switches == wait->switches;
	}
	now.state = state_of(task);
	if (now.state != STATE_ON_CPU) {
		now.off_cpu_ns = now_ns - since_of(task, task->start_time, now_ns);
		if (!now.off_cpu_ns)
			now.off_cpu_ns = 1;
	}
	now.shown = shown_number(task);
	now.tid = task->pid;
	now.is_kernel = (task->flags & PF_KTHREAD) != 0;
	now.syscall = now.is_kernel ? -1 : syscall_of(task);
	if (task->flags & PF_WQ_WORKER)
		now.handler = handler_of_worker(task);
	BPF_CORE_READ_STR_INTO(&now.comm, task, comm);
	bpf_seq_write(ctx->meta->seq, &now, sizeof(now));
}

/* 0.2 us a thread and walk. Words of locks are read of threads that are off their CPUs, and cannot run. */
SEC("iter/task")
int on_each_thread_tell_holder(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct wait_for wait = {};

	if (!task)
		return 0;
	if (holders_walk == HOLDERS_TELL) {
		tell_holder(task, ctx);
		return 0;
	}
	if (task->flags & PF_WQ_WORKER)
		read_barriers(task);
	if (task->exit_state || task->tgid == own_tgid || !is_blocked(task))
		return 0;
	wait.switches = switches_of(task);
	if (!read_lock(task, &wait))
		return 0;
	/* Whoever had it last has let go: nobody waits so for itself. */
	if (wait.holder == (u64)task && (wait.kind == LOCK_SEMAPHORE || wait.kind == LOCK_RWSEM_READERS))
		return 0;
	keep_wait((u64)task, &wait);
	return 0;
}
