// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes tables as Parquet.

use std::mem::take;
use std::sync::Arc;

use parquet::basic::{Compression, LogicalType, Repetition, TimeUnit, Type as Physical};
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, DataType, DoubleType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::types::{ColumnPath, Type};

use super::tables::{Cell, Column, Kind, Row, Sink, Table};
use crate::files::PendingFile;

/// A row group is kept in memory until it has this many cells or this many bytes of text.
const GROUP_CELLS: usize = 500_000;
const GROUP_BYTES: usize = 8 << 20;
/// Columns of names repeat few values. A dictionary that grows beyond this size is abandoned for plain encoding.
const DICTIONARY_BYTES: usize = 256 << 10;

/// A file for each table.
pub struct Files(Vec<File>);

struct File {
    writer: SerializedFileWriter<PendingFile>,
    columns: Vec<ColumnBuffer>,
    rows: usize,
    bytes: usize,
}

/// Values of a column in the current row group, and for each row its definition level: 1 if it has a value.
struct ColumnBuffer {
    definition_levels: Vec<i16>,
    values: TypedValues,
}

enum TypedValues {
    Text(Vec<ByteArray>),
    Integers(Vec<i64>),
    Number(Vec<f64>),
    Flag(Vec<bool>),
}

impl Files {
    /// Starts the files, one per table with these columns, without rows.
    pub fn begin(files: Vec<PendingFile>, columns: fn(Table) -> Vec<Column>) -> Result<Self, ParquetError> {
        let all = Table::ALL.into_iter().zip(files).map(|(table, file)| File::begin(table, &columns(table), file));
        Ok(Files(all.collect::<Result<_, _>>()?))
    }

    /// Writes the remaining rows. The files appear once the caller completes them.
    pub fn complete(self) -> anyhow::Result<Vec<PendingFile>> {
        let complete = |mut file: File| {
            file.write_group()?;
            Ok(file.writer.into_inner()?)
        };
        self.0.into_iter().map(complete).collect()
    }
}

impl Sink for Files {
    fn add(&mut self, table: Table, row: Row<'_>) -> anyhow::Result<()> {
        Ok(self.0[table as usize].add(row)?)
    }

    fn end(self: Box<Self>) -> anyhow::Result<()> {
        self.complete()?.into_iter().try_for_each(|file| Ok(file.end()?))
    }
}

impl File {
    fn begin(table: Table, columns: &[Column], file: PendingFile) -> Result<File, ParquetError> {
        let fields = columns.iter().map(|column| Ok(Arc::new(field(column)?)));
        let fields = fields.collect::<Result<Vec<_>, ParquetError>>()?;
        let schema = Type::group_type_builder(table.name()).with_fields(fields).build()?;
        // Numbers repeat too rarely for dictionaries, which cost memory in each column.
        let mut properties = WriterProperties::builder()
            .set_created_by(format!("whylate {}", env!("CARGO_PKG_VERSION")))
            .set_compression(Compression::SNAPPY)
            .set_dictionary_enabled(false)
            .set_dictionary_page_size_limit(DICTIONARY_BYTES);
        for column in columns.iter().filter(|column| column.kind == Kind::Text) {
            properties = properties.set_column_dictionary_enabled(ColumnPath::from(column.name), true);
        }
        let writer = SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties.build()))?;
        let columns = columns
            .iter()
            .map(|column| ColumnBuffer { definition_levels: Vec::new(), values: TypedValues::empty(column.kind) })
            .collect();
        Ok(File { writer, columns, rows: 0, bytes: 0 })
    }

    fn add(&mut self, row: Row<'_>) -> Result<(), ParquetError> {
        for (into, (_, cell)) in self.columns.iter_mut().zip(row) {
            self.bytes += into.add(cell);
        }
        self.rows += 1;
        if self.rows * self.columns.len() >= GROUP_CELLS || self.bytes >= GROUP_BYTES {
            self.write_group()?;
        }
        Ok(())
    }

    fn write_group(&mut self) -> Result<(), ParquetError> {
        if self.rows == 0 {
            return Ok(());
        }
        let mut group = self.writer.next_row_group()?;
        for column in &mut self.columns {
            let definition_levels = take(&mut column.definition_levels);
            match &mut column.values {
                TypedValues::Text(values) => write::<ByteArrayType>(&mut group, &take(values), &definition_levels),
                TypedValues::Integers(values) => write::<Int64Type>(&mut group, &take(values), &definition_levels),
                TypedValues::Number(values) => write::<DoubleType>(&mut group, &take(values), &definition_levels),
                TypedValues::Flag(values) => write::<BoolType>(&mut group, &take(values), &definition_levels),
            }?;
        }
        group.close()?;
        (self.rows, self.bytes) = (0, 0);
        Ok(())
    }
}

fn write<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, PendingFile>,
    values: &[T::T],
    definition_levels: &[i16],
) -> Result<(), ParquetError> {
    if let Some(mut column) = group.next_column()? {
        column.typed::<T>().write_batch(values, Some(definition_levels), None)?;
        column.close()?;
    }
    Ok(())
}

/// Returns the type of a column. All columns are optional: sources differ in what they measure.
fn field(column: &Column) -> Result<Type, ParquetError> {
    let (physical, logical) = match column.kind {
        Kind::Text => (Physical::BYTE_ARRAY, Some(LogicalType::String)),
        Kind::Count => (Physical::INT64, Some(LogicalType::integer(64, false))),
        Kind::Stamp => (Physical::INT64, Some(LogicalType::timestamp(true, TimeUnit::MICROS))),
        Kind::Number => (Physical::DOUBLE, None),
        Kind::Flag => (Physical::BOOLEAN, None),
    };
    let field = Type::primitive_type_builder(column.name, physical);
    field.with_repetition(Repetition::OPTIONAL).with_logical_type(logical).build()
}

impl TypedValues {
    fn empty(kind: Kind) -> TypedValues {
        match kind {
            Kind::Text => TypedValues::Text(Vec::new()),
            Kind::Count | Kind::Stamp => TypedValues::Integers(Vec::new()),
            Kind::Number => TypedValues::Number(Vec::new()),
            Kind::Flag => TypedValues::Flag(Vec::new()),
        }
    }
}

impl ColumnBuffer {
    /// Adds a cell. Returns its size as text in bytes, or 0.
    fn add(&mut self, cell: Cell<'_>) -> usize {
        let mut bytes = 0;
        let is_present = match (&mut self.values, cell) {
            (TypedValues::Text(values), Cell::Text(Some(text))) => {
                bytes = text.len();
                values.push(ByteArray::from(text.into_owned().into_bytes()));
                true
            }
            // Parquet stores an unsigned integer as the bits of a signed one.
            (TypedValues::Integers(values), Cell::Count(Some(number))) => {
                values.push(number as i64);
                true
            }
            // Microseconds, like timestamps in recordings: all engines can compare them.
            (TypedValues::Integers(values), Cell::Stamp(Some(unix_ns))) => {
                values.push((unix_ns / 1_000) as i64);
                true
            }
            (TypedValues::Number(values), Cell::Number(Some(number))) => {
                values.push(number);
                true
            }
            (TypedValues::Flag(values), Cell::Flag(Some(flag))) => {
                values.push(flag);
                true
            }
            _ => false,
        };
        self.definition_levels.push(i16::from(is_present));
        bytes
    }
}
