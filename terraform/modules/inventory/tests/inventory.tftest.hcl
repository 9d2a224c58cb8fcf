# What went wrong before: a play met an undefined group; two hosts behind one address took each other's handoffs; a
# bracketed IPv6 address reached a sender thread and failed there.

variables {
  nodes = {
    p1 = { role = "prefill", address = "10.0.0.1", gpus = 8 }
    d1 = { role = "decode", address = "10.0.0.2", fabric_address = "fd00::2", rdma_devices = ["mlx5_0"], gpus = 8 }
    r1 = { role = "router", address = "router.example", also = ["ingress"], vars = { ansible_user = "ops" } }
  }
}

run "every_group_exists" {
  command = plan
  assert {
    condition     = jsonencode(keys(output.inventory)) == jsonencode(["decode", "ingress", "native", "observability", "prefill", "router"])
    error_message = "groups: ${jsonencode(keys(output.inventory))}"
  }
  assert {
    condition     = jsonencode(output.inventory.native) == "{}"
    error_message = "an empty group must be an empty map"
  }
}

run "host_variables" {
  command = plan
  assert {
    condition     = jsonencode(output.inventory.decode.d1) == jsonencode({ address = "10.0.0.2", ansible_host = "10.0.0.2", fabric_address = "fd00::2", gpus = 8, rdma_devices = ["mlx5_0"], shape = "custom" })
    error_message = jsonencode(output.inventory.decode.d1)
  }
  assert {
    condition     = output.inventory.prefill.p1.fabric_address == "10.0.0.1"
    error_message = "without a fabric address handoffs arrive at the address"
  }
}

run "a_host_can_carry_a_further_group" {
  command = plan
  assert {
    condition     = jsonencode(output.inventory.ingress.r1) == jsonencode(output.inventory.router.r1) && output.inventory.ingress.r1.ansible_user == "ops"
    error_message = "the router host is the ingress too, with the same variables"
  }
}

run "no_decode_host" {
  command = plan
  variables { nodes = { p1 = { role = "prefill", address = "10.0.0.1" } } }
  expect_failures = [var.nodes]
}

run "no_prefill_host" {
  command = plan
  variables { nodes = { d1 = { role = "decode", address = "10.0.0.1" } } }
  expect_failures = [var.nodes]
}

run "unknown_role" {
  command = plan
  variables {
    nodes = { p1 = { role = "prefill", address = "10.0.0.1" }, d1 = { role = "decode", address = "10.0.0.2" }, x = { role = "worker", address = "10.0.0.3" } }
  }
  expect_failures = [var.nodes]
}

run "unknown_further_group" {
  command = plan
  variables {
    nodes = { p1 = { role = "prefill", address = "10.0.0.1", also = ["storage"] }, d1 = { role = "decode", address = "10.0.0.2" } }
  }
  expect_failures = [var.nodes]
}

run "duplicate_address" {
  command = plan
  variables {
    nodes = { p1 = { role = "prefill", address = "10.0.0.1" }, d1 = { role = "decode", address = "10.0.0.1", fabric_address = "10.1.0.1" } }
  }
  expect_failures = [var.nodes]
}

run "duplicate_fabric_address" {
  command = plan
  variables {
    nodes = { p1 = { role = "prefill", address = "10.0.0.1", fabric_address = "10.1.0.1" }, d1 = { role = "decode", address = "10.0.0.2", fabric_address = "10.1.0.1" } }
  }
  expect_failures = [var.nodes]
}

run "bracketed_ipv6" {
  command = plan
  variables {
    nodes = { p1 = { role = "prefill", address = "[fd00::1]" }, d1 = { role = "decode", address = "10.0.0.2" } }
  }
  expect_failures = [var.nodes]
}

run "address_with_port" {
  command = plan
  variables {
    nodes = { p1 = { role = "prefill", address = "10.0.0.1:8000" }, d1 = { role = "decode", address = "10.0.0.2" } }
  }
  expect_failures = [var.nodes]
}

run "address_out_of_range" {
  command = plan
  variables {
    nodes = { p1 = { role = "prefill", address = "10.0.0.300" }, d1 = { role = "decode", address = "10.0.0.2" } }
  }
  expect_failures = [var.nodes]
}

run "half_a_gpu" {
  command = plan
  variables {
    nodes = { p1 = { role = "prefill", address = "10.0.0.1", gpus = 0.5 }, d1 = { role = "decode", address = "10.0.0.2" } }
  }
  expect_failures = [var.nodes]
}

run "rdma_device_twice" {
  command = plan
  variables {
    nodes = { p1 = { role = "prefill", address = "10.0.0.1" }, d1 = { role = "decode", address = "10.0.0.2", rdma_devices = ["mlx5_0", "mlx5_0"] } }
  }
  expect_failures = [var.nodes]
}

run "name_that_is_no_host_name" {
  command = plan
  variables {
    nodes = { "P 1" = { role = "prefill", address = "10.0.0.1" }, d1 = { role = "decode", address = "10.0.0.2" } }
  }
  expect_failures = [var.nodes]
}
