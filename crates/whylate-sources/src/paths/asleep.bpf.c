// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Lists the sleeping threads with their system calls: first for waits that began before the recording, then for waits that last. Takes
 * 0.2 us per thread.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>
#include "compat.bpf.h"
#include "registers.bpf.h"
#include "pid_namespace.bpf.h"
#include "lock_owner.bpf.h"
#include "lock_of.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Bits of task_struct.flags: threads that come back from no system call. */
enum {
	PF_USER_WORKER = 0x4000,
	PF_KTHREAD = 0x200000,
};

struct thread_asleep {
	/* TID, and PID of its process, as shown. */
	u32 tid;
	u32 process;
	s32 syscall;
	/* Number of context switches, which differs in the next wait. */
	u32 switches;
	/* enum lock_kind and enum lock_of, if the thread waits for a kernel lock with a recorded owner. */
	u32 lock;
	u32 lock_of;
	/* TID of the owner; 0: not known for certain. */
	u32 holder;
	/* PID of the process that created its process; 0: unknown. */
	u32 parent;
	/* Of a thread that waits for an rt_mutex: the second argument of its system call, the operation of a futex. */
	u32 operation;
	/* It executes a program: most of /proc about its process may wait until that is over. */
	u32 in_exec;
	u8 name[16];
};

/* Nothing is ever in it: it puts the type that user space shares into the skeleton. */
struct {
	struct thread_asleep thread_asleep;
	enum lock_kind lock_kind;
	enum lock_of lock_of;
} layouts = {};

static __always_inline u32 parent_of(const struct task_struct *task)
{
	u64 parent = (u64)BPF_CORE_READ(task, real_parent, group_leader);

	return own_namespace ? number_by_address(&parent) : BPF_CORE_READ((const struct task_struct *)parent, pid);
}

/* Returns whether `lock` is the lock of the inode of this descriptor. */
static __always_inline bool is_of_descriptor(const struct task_struct *task, u64 lock, u64 descriptor)
{
	const struct file *file = file_of(task, descriptor);

	return file && is_of_inode(BPF_CORE_READ(file, f_inode), lock);
}

/*
 * The owner of a held mutex or rwsem has not exited, and the iterator holds the RCU read lock, so its memory is not freed. A reader, or
 * the last holder of a semaphore, may have released the lock and exited.
 */
static __always_inline void read_owner(struct thread_asleep *asleep, struct task_struct *task)
{
	struct wait_for wait = {};
	const struct task_struct *holder;

	if (!read_lock(task, &wait))
		return;
	asleep->lock = wait.kind;
	if (wait.kind == LOCK_RT_MUTEX && asleep->syscall >= 0)
		asleep->operation = second_argument_of(task);
	if (is_of_memory(BPF_CORE_READ(task, mm), wait.lock))
		asleep->lock_of = LOCK_OF_MEMORY;
	else if (asleep->syscall >= 0 && is_of_descriptor(task, wait.lock, first_argument_of(task)))
		asleep->lock_of = LOCK_OF_DESCRIPTOR;
	if (wait.kind == LOCK_SEMAPHORE || wait.kind == LOCK_RWSEM_READERS)
		return;
	holder = (const struct task_struct *)wait.holder;
	if (own_namespace)
		asleep->holder = number_by_address(&wait.holder);
	else
		asleep->holder = BPF_CORE_READ(holder, pid);
}

SEC("iter/task")
int on_each_thread(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct thread_asleep asleep = {};

	if (!task || task->exit_state || task->flags & (PF_KTHREAD | PF_IO_WORKER | PF_USER_WORKER))
		return 0;
	if (task->on_cpu || !(task->__state & ~TASK_WAKING))
		return 0;
	asleep.syscall = syscall_of(task);
	read_owner(&asleep, task);
	if (bpf_core_field_exists(task->in_execve))
		asleep.in_exec = BPF_CORE_READ_BITFIELD(task, in_execve);
	if (asleep.syscall < 0 && !asleep.lock && !asleep.in_exec)
		return 0;
	asleep.tid = shown_number(task);
	asleep.process = shown_process(task);
	asleep.parent = parent_of(task);
	asleep.switches = task->nvcsw + task->nivcsw;
	BPF_CORE_READ_STR_INTO(&asleep.name, task, comm);
	bpf_seq_write(ctx->meta->seq, &asleep, sizeof(asleep));
	return 0;
}
