/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Finds what a kernel lock is part of, from its address. */
#pragma once

#include <bpf/bpf_core_read.h>
#include "registers.bpf.h"

/* What a lock is part of. */
enum lock_of {
	LOCK_OF_UNKNOWN,
	/* The memory map of a process. */
	LOCK_OF_MEMORY,
	/* The inode of the descriptor that is the first argument of the system call. */
	LOCK_OF_DESCRIPTOR,
	/* Another inode. */
	LOCK_OF_INODE,
	/* The pipe of that descriptor. */
	LOCK_OF_PIPE,
	/* The file position of that descriptor. */
	LOCK_OF_POSITION,
};

/* The lock is in this rwsem. With PREEMPT_RT, a thread may block on an rt_mutex within it. */
static __always_inline bool is_in_rwsem(u64 lock, u64 rwsem)
{
	return lock >= rwsem && lock - rwsem < bpf_core_type_size(struct rw_semaphore);
}

static __always_inline bool is_of_memory(const struct mm_struct *memory, u64 lock)
{
	return memory && bpf_core_field_exists(memory->mmap_lock) &&
	       is_in_rwsem(lock, (u64)memory + bpf_core_field_offset(struct mm_struct, mmap_lock));
}

/* Returns a thread with the memory map whose lock this is; NULL if it is none. The map and the thread point to each other. */
static __always_inline const struct task_struct *owner_of_memory(u64 rwsem)
{
	const struct mm_struct *memory = NULL;
	const struct task_struct *owner;

	if (!bpf_core_field_exists(memory->mmap_lock) || !bpf_core_field_exists(memory->owner))
		return NULL;
	memory = (const void *)(rwsem - bpf_core_field_offset(struct mm_struct, mmap_lock));
	owner = BPF_CORE_READ(memory, owner);
	return owner && BPF_CORE_READ(owner, mm) == memory ? owner : NULL;
}

static __always_inline bool is_of_inode(const struct inode *inode, u64 lock)
{
	return inode && is_in_rwsem(lock, (u64)inode + bpf_core_field_offset(struct inode, i_rwsem));
}

/* Returns the open file of a descriptor of the thread, or NULL. */
static __always_inline const struct file *file_of(const struct task_struct *task, u64 descriptor)
{
	const struct fdtable *table = BPF_CORE_READ(task, files, fdt);
	struct file *file = NULL, **files;

	if (!table || descriptor >= BPF_CORE_READ(table, max_fds))
		return NULL;
	files = BPF_CORE_READ(table, fd);
	bpf_probe_read_kernel(&file, sizeof(file), files + descriptor);
	return file;
}

/*
 * Returns the inode whose lock this is, or NULL. An inode points to itself by its own address space, and its file system's root points back
 * to the file system: no other memory around a lock does both.
 */
static __always_inline const struct inode *inode_around(u64 rwsem)
{
	const struct inode *inode = (const void *)(rwsem - bpf_core_field_offset(struct inode, i_rwsem));
	const struct super_block *super;

	if (BPF_CORE_READ(inode, i_data.host) != inode)
		return NULL;
	super = BPF_CORE_READ(inode, i_sb);
	return super && BPF_CORE_READ(super, s_root, d_sb) == super ? inode : NULL;
}

/* Likewise for a lock within the inode's rwsem. */
static __always_inline const struct inode *inode_of_lock(u64 lock)
{
	const struct inode *inode = inode_around(lock);

	if (!inode && bpf_core_type_exists(struct rwbase_rt))
		inode = inode_around(lock - bpf_core_field_offset(struct rwbase_rt, rtmutex));
	return inode;
}
