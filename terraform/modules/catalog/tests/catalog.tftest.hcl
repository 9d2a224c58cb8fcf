# What went wrong before: a row without a field failed deep inside a module; a verbs transport was promised on EFA.

run "rows_are_whole_and_consistent" {
  command = plan
  assert {
    condition     = alltrue([for row in values(output.shapes) : contains(["aws", "gcp", "oci", "onprem"], row.provider) && length(row.source) > 0 && length(row.image) > 0])
    error_message = "every row names its provider, its source and what it expects of an image"
  }
  assert {
    condition     = alltrue([for row in values(output.shapes) : row.checked == null || can(formatdate("YYYY", "${row.checked}T00:00:00Z"))])
    error_message = "checked is the day on which the row was compared with its source"
  }
  assert {
    condition     = alltrue([for shape, row in output.shapes : row.gpus == 0 || row.checked != null])
    error_message = "a GPU shape's figures were compared with their source: ${join(", ", [for shape, row in output.shapes : shape if row.gpus > 0 && row.checked == null])}"
  }
  assert {
    condition     = alltrue([for row in values(output.shapes) : row.rdma == (row.rdma_nics > 0) && row.rails <= row.rdma_nics && row.ordinary_nics >= 1])
    error_message = "RDMA fabrics have RDMA NICs, others have none"
  }
  assert {
    condition     = alltrue([for row in values(output.shapes) : row.gpus == 0 ? row.gpu == null && row.compute_capability == null : row.compute_capability != null && row.gpu_memory_gb > 0])
    error_message = "GPU shapes say which GPU, others say none"
  }
}

run "every_cloud_can_decode_prefill_and_route" {
  command = plan
  assert {
    condition = alltrue([for provider in ["aws", "gcp", "oci", "onprem"] : anytrue([
      for row in values(output.shapes) : row.provider == provider && row.gpus == 8 && try(row.compute_capability == "10.0", false)
      ]) && anytrue([
      for row in values(output.shapes) : row.provider == provider && row.gpus == 0
    ])])
    error_message = "each provider needs a decode shape and a CPU shape"
  }
  assert {
    condition     = length(setsubtract(["p6-b200.48xlarge", "a4-highgpu-8g", "BM.GPU.B200.8"], keys(output.shapes))) == 0
    error_message = "the three B200 shapes must be there"
  }
}

run "efa_has_no_verbs" {
  command = plan
  assert {
    condition     = alltrue([for row in values(output.shapes) : length(setintersection(row.transports, ["mooncake:rdma", "nixl:UCX"])) == 0 if row.fabric == "efa"])
    error_message = "verbs transports do not work on EFA"
  }
}

run "a_list_price_says_when_and_where" {
  command = plan
  assert {
    condition     = length(setsubtract(keys(output.prices), keys(output.shapes))) == 0
    error_message = "prices of shapes that are not in the catalogue: ${join(", ", setsubtract(keys(output.prices), keys(output.shapes)))}"
  }
  assert {
    condition     = alltrue([for price in values(output.prices) : price.usd_per_hour > 0 && can(formatdate("YYYY", "${price.as_of}T00:00:00Z")) && length(price.source) > 10])
    error_message = "a price has a figure, a day and a source"
  }
}
