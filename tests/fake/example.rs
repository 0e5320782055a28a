// The store that the examples of the documentation run on; they include this file. It is no test.
//
// A model `tiny` with one module, `double`, which takes `x`, float32 `[batch, seq]`, at most 4 by 8, and gives `y`,
// which is twice `x`, and `sum`, which adds up each row of `y`. Its artifacts are those of tests/fake: compiled by g++
// instead of AOTInductor, with the same C ABI.

#[allow(dead_code)]
mod fake {
    include!("records.rs");
}

fn example() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let store = precast_store::Store::create(folder.path()).unwrap();
    let mut memory = fake::Memory::default();
    for (rows, cols) in [(1, 4), (4, 8)] {
        let fake = fake::Fake::sized(rows, cols).outputs(2);
        memory.add("double", &fake);
    }
    memory.weights = Some(memory.put(fake::weights(&[("scale", &[2.0])])));
    memory.publish(&store, "tiny");
    folder
}
